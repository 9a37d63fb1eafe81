"""The agreement: parameters, a rule, and the tally in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consilience.observation.compiled import Slots
from consilience.observation.environments import EnvironmentLabels, Environments
from consilience.observation.errors import NotVotedOnError, ObservationError
from consilience.observation.ledger import Ledger
from consilience.observation.mode import ObservingMode
from consilience.observation.oracle import tally_losses
from consilience.observation.uses import Observation, Watched, watch
from consilience.optim._agreed_step import agreed_step, check_agreed_step
from consilience.optim._masked_step import Decay, Masked
from consilience.report import Report
from consilience.rules import Rule, Statistic, Tally

BatchNorm = Literal["joint", "per_environment"]
Unvoted = Literal["raise", "allow"]

CONSERVED = {torch.float64: 1e-7, torch.float32: 1e-3}
"""How much of a gradient may be left over once what was observed is taken off; in half precision
a twentieth."""

MAGNITUDES = frozenset({Statistic.LOGS, Statistic.SQUARES})
"""The statistics that change with the scale of a gradient."""

LEFT = "_consilience_left"
"""Kept on a gradient that `apply` left: which version of it that was."""


class Agreement:
    r"""Turns the gradient of a model into what its environments agree about.

    While :meth:`observe` is active, the model's forward pass runs as ever; in the backward pass
    each operation that consumed a parameter counts, beside the ordinary gradient, the votes of the
    environments on it: the signs of their gradients. :meth:`apply` then replaces every gradient by
    what the rule makes of it and its tally.

    Args:
        parameters: A model, or parameters (or pairs of a name and a parameter).
        rule: From a tally to the gradient that the optimizer sees, as
            :class:`~consilience.AndMask`.
        batchnorm: What to do about train-mode batch normalization, which couples rows. None: raise
            an error that explains the ways out. ``"joint"``: count rows' shares of the joint
            gradient. ``"per_environment"``: normalize each environment by its own statistics.
        batch_dim: Which dimension of the model's inputs holds the rows.
        allow_single: Whether a batch of a single environment is allowed; its votes are unanimous.
        unvoted: What to do about a gradient, or a part of one, that no environment voted on.
            ``"raise"``: an error, as it mostly means that an operation was not seen. ``"allow"``:
            it is kept; say so where a penalty on weights is added outside of the observation.

    Example:
        >>> import torch
        >>> from consilience import Agreement, AndMask
        >>> model = torch.nn.Linear(3, 1)
        >>> agreement = Agreement(model, AndMask(threshold=1.0))
        >>> x, env = torch.randn(8, 3), [0, 0, 0, 0, 1, 1, 1, 1]
        >>> with agreement.observe(env):
        ...     loss = model(x).square().mean()
        >>> loss.backward()
        >>> report = agreement.apply()
        >>> report.voters
        2.0

    Warning:
        Signs do not add: an environment that straddles two observations, as when a batch is cut
        into micro-batches across environments, votes twice. Cut batches along environments.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        rule: Rule,
        *,
        batchnorm: BatchNorm | None = None,
        batch_dim: int = 0,
        allow_single: bool = False,
        unvoted: Unvoted = "raise",
    ):
        named, self._modules = _named(parameters)
        if not named:
            raise ValueError("Parameter `parameters` should hold a parameter or more. Found none.")
        if not any(parameter.requires_grad for _, parameter in named):
            raise ValueError(
                "Parameter `parameters` should hold a parameter that requires grad. Found none: "
                "all are frozen."
            )
        for name, parameter in named:
            if torch.nn.parameter.is_lazy(parameter):
                raise TypeError(
                    "Parameter `parameters` should be initialized. Found the lazy parameter "
                    f"`{name}`: run the model once before."
                )
            if parameter.is_complex():
                raise TypeError(
                    "Parameter `parameters` should be real: a complex number has no sign. Found "
                    f"`{name}` of {parameter.dtype}. Keep it as `torch.view_as_real`."
                )
        if not isinstance(rule, Rule):
            raise TypeError(
                "Parameter `rule` should be a rule, as `AndMask(threshold=0.8)`. Found "
                f"`rule = {rule!r}`."
            )
        _check_choice("batchnorm", batchnorm, (None, "joint", "per_environment"))
        _check_choice("unvoted", unvoted, ("raise", "allow"))
        _check_choice("batch_dim", batch_dim, (0, 1))
        _check_choice("allow_single", allow_single, (False, True))
        self.rule = rule
        self.batchnorm = batchnorm
        self.batch_dim = batch_dim
        self.allow_single = allow_single
        self.unvoted = unvoted
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._ledger = Ledger()
        self._observations: list[Observation] = []
        self._mode: ObservingMode | None = None
        self._unchecked = set(range(len(named)))
        self._checks = 0
        self._watching: set[int] = set()
        self._watched: Watched = {}
        self._met_strangers = False
        self._report: Report | None = None
        self._stepped: set[int] = set()  # parameters that stepped on these votes
        self._slots = Slots(self._parameters, rule.statistics)

    # Observing

    @contextmanager
    def observe(self, env: EnvironmentLabels | None = None) -> Iterator[None]:
        """Observe the forward passes in this block; their backward passes may come later.

        Args:
            env: The environment of each row: integers or strings, in any order. ``-1``, ``"-1"`` or
                ``None`` among them: unknown; the row keeps its share of the gradient and does not
                vote. None: every row of the first tensor that is used in this block is its own
                environment; so cut a batch out of a dataset before the block.
        """
        if self._mode is not None:
            raise ObservationError(
                "An observation of this agreement is active already. Close it before you open "
                "another one: observations cannot be nested."
            )
        for active in _active_modes():
            if {id(p) for p in active.observation.parameters} & {id(p) for p in self._parameters}:
                raise ObservationError(
                    "An observation of another agreement on the same parameters is active. "
                    "Close it first: observations cannot be nested."
                )
        environments = Environments.of(env, allow_single=self.allow_single)
        self._gather()
        self._forget_report()
        if self.unvoted == "raise" and not self._ledger:
            self._watching |= self._unchecked
        observation = Observation(
            self._parameters,
            self._names,
            self.rule.statistics,
            environments,
            self._watching,
            self._take_up,
        )
        mode = ObservingMode(
            observation,
            self._constants(),
            batchnorm=self.batchnorm,
            batch_dim=self.batch_dim,
            allow_single=self.allow_single,
            slots=self._slots,
        )
        self._mode = mode
        self._observations.append(observation)
        try:
            with mode:
                yield
        except BaseException:
            # Whatever was counted inside of this block is gone, as if it had not been entered.
            if observation in self._observations:
                self._observations.remove(observation)
            observation.dead = True
            self._slots.abandon()
            raise
        finally:
            self._mode = None

    def _take_up(self, observation: Observation) -> None:
        """Count on an observation into which a backward pass came, at first or after an apply."""
        self._check_zeroed()
        if observation not in self._observations:
            self._observations.append(observation)

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts that non-reentrant checkpointing takes, so that it is observed.

        Example:
            .. code-block:: python

                checkpoint(block, x, use_reentrant=False, context_fn=agreement.checkpoint_contexts)
        """
        if self._mode is None:
            return nullcontext(), nullcontext()
        return nullcontext(), _replay(self._mode, self)

    def backward(self, environment_losses: Tensor | Iterable[Tensor]) -> None:
        """Run one backward pass per environment, and count its votes.

        The second way in, for graphs that rows cannot describe: train-mode batch normalization,
        states that are carried from row to row, a list of per-environment batches. Exact for any
        graph; costs a backward pass per environment, and memory of a few times the parameters
        however many there are. The gradient becomes that of the mean of the losses.

        Args:
            environment_losses: A vector of per-environment losses, or an iterable (or the values
                of a dictionary) that gives one loss after the other. With a generator, only one
                graph lives at a time.

        Example:
            >>> import torch
            >>> from consilience import Agreement, AndMask
            >>> model = torch.nn.Linear(3, 1)
            >>> agreement = Agreement(model, AndMask(threshold=1.0))
            >>> batches = [torch.randn(4, 3), torch.randn(5, 3)]
            >>> agreement.backward(model(x).square().mean() for x in batches)
            >>> agreement.apply().voters
            2.0
        """
        if self._mode is not None:
            raise ObservationError(
                "`agreement.backward` was called inside of an observation. It needs none: call it "
                "outside, with losses that were computed outside."
            )
        self._check_zeroed()
        self._forget_report()
        gradients, counts = tally_losses(
            environment_losses,
            self._parameters,
            self.rule.statistics,
            allow_single=self.allow_single,
        )
        for i, (gradient, count) in enumerate(zip(gradients, counts, strict=True)):
            if gradient is None:
                continue
            parameter = self._parameters[i]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
            self._ledger[i].merge(count)
            if i in self._watching:
                watch(self._watched, i, parameter, "agreement.backward").add_(gradient)

    # Applying

    @torch.no_grad()
    def apply(self) -> Report:
        """Replace every gradient by what the rule makes of it and its tally.

        Parameters without a gradient (frozen, or not reached by the loss) are left alone.

        Returns:
            What the environments agreed about. It may be read until the next observation.
        """
        if self._mode is not None:
            raise ObservationError(
                "`agreement.apply` was called inside of an observation. Close the `with` block "
                "first, and run the backward pass."
            )
        self._gather(finish=True)
        compiled = self._slots.collect(self._ledger, self._names)
        if compiled or self._met_strangers or not self._ledger:
            self._check_known()
        self._check_voted()
        self._check_conserved()
        tallies: dict[str, Tally] = {}
        results: list[tuple[Tensor, Tensor]] = []
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is None or i not in self._ledger:
                continue
            count = self._ledger[i]
            found = {statistic.value: amount for statistic, amount in count.statistics.items()}
            tally = Tally(parameter.grad, count.voters, **found)
            tallies[self._names[i]] = tally
            results.append((parameter, self._ruled(self._names[i], tally)))
        # Where a rule raises, nothing was changed.
        for parameter, result in results:
            left = result if result.dtype == parameter.dtype else result.to(parameter.dtype)
            parameter.grad = left
            setattr(left, LEFT, left._version)
        self._ledger.clear()
        self._met_strangers = False
        self._report = Report(self.rule, tallies)
        return self._report

    def _ruled(self, name: str, tally: Tally) -> Tensor:
        result = self.rule(tally)
        if not isinstance(result, Tensor) or result.shape != tally.gradient.shape:
            found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(
                f"Parameter `rule` should return a tensor of the shape of the gradient. Found "
                f"{found} from {self.rule!r} for `{name}`, whose gradient has the shape "
                f"{list(tally.gradient.shape)}."
            )
        return result

    def step(
        self,
        optimizer: Optimizer,
        *,
        masked: Masked = "gradient",
        decay: Decay = "before",
        step: Callable[[], Any] | None = None,
    ) -> Report:
        r"""Apply the rule, if that was not done yet, and let an optimizer step.

        A masked gradient does not freeze a weight: momentum, Adam's moments and weight decay
        still move it. What else to hold back is the choice here:

        ============ ============================== ===================== =====================
        ``masked``   the optimizer sees             masked weights        their averages
        ============ ============================== ===================== =====================
        ``gradient`` what the rule returns          move                  go on, towards 0
        ``update``   the plain gradient where       stay                  go on
                     masked, else what the rule
                     returns
        ``frozen``   what the rule returns          stay                  stay
        ============ ============================== ===================== =====================

        ``masked="gradient"`` with ``decay="before"`` is ``agreement.apply()`` and
        ``optimizer.step()``. For times and memory, and what else to know, see
        :func:`~consilience.optim.masked_step`.

        Args:
            optimizer: Any optimizer of these parameters, or of some of them.
            masked: What a mask holds back.
            decay: When the optimizer's ``weight_decay`` happens: ``"before"``, as part of its
                step; ``"after"``, as a second update of all weights; ``"none"``.
            step: What to call in place of ``optimizer.step``:
                ``lambda: scaler.step(optimizer)`` with a ``GradScaler``.

        Returns:
            What the environments agreed about.

        Example:
            >>> import torch
            >>> from consilience import Agreement, AndMask
            >>> weight = torch.ones(2, requires_grad=True)
            >>> agreement = Agreement([weight], AndMask(threshold=1.0))
            >>> optimizer = torch.optim.SGD([weight], lr=0.25, weight_decay=1.0)
            >>> agreement.backward([weight.sum(), weight[0] - weight[1]])
            >>> agreement.step(optimizer, masked="frozen").kept
            0.5
            >>> weight.tolist()
            [0.5, 1.0]
        """
        check_agreed_step(optimizer, self._parameters, self.rule, masked, decay)
        ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if ours & self._stepped:
            raise ObservationError(
                "These votes were stepped on before. Observe the next batch (the forward pass "
                "inside of `with agreement.observe(env):`) before the next `agreement.step`."
            )
        fresh = self._report is None
        report = self.apply() if self._report is None else self._report
        tallies = report._tallies or {}
        agreed_step(
            optimizer,
            self.rule,
            {p: tallies[name] for name, p in self.named_parameters() if name in tallies},
            masked=masked,
            decay=decay,
            step=step,
            fresh=fresh,
        )
        self._stepped |= ours
        return report

    def clear(self) -> None:
        """Forget all votes that were not applied. Gradients are left alone."""
        for observation in self._observations:
            observation.dead = True
        self._observations = []
        self._ledger.clear()
        self._slots.clear()
        self._watching.clear()
        self._watched.clear()
        self._met_strangers = False
        self._forget_report()

    def _gather(self, *, finish: bool = False) -> None:
        """Take over the votes of observations that wait for nothing more (or of all)."""
        waiting = []
        for observation in self._observations:
            if finish:
                observation.finish()
            if not finish and observation.open:
                waiting.append(observation)
                continue
            self._ledger.merge(observation.ledger)
            for i, (total, uses) in observation.watched.items():
                for use in uses:
                    watch(self._watched, i, self._parameters[i], use)
                self._watched[i][0].add_(total)
            observation.watched = {}
            self._met_strangers = self._met_strangers or observation.met_strangers
        self._observations = waiting

    def _check_voted(self) -> None:
        if (
            not self._ledger
            and self.unvoted == "raise"
            and not any(parameter.grad is not None for parameter in self._parameters)
        ):
            raise ObservationError(
                "There is nothing to apply: no backward pass reached an observed parameter. Run "
                "the forward pass inside of `with agreement.observe(env):`, and `loss.backward()` "
                "before `agreement.apply()`."
            )
        gone = [
            self._names[i]
            for i in self._ledger
            if self._parameters[i].grad is None and self._parameters[i].requires_grad
        ]
        if gone:
            raise ObservationError(
                f"Parameters {', '.join(f'`{name}`' for name in gone)} were voted on and have no "
                "gradient: `zero_grad` was called between `loss.backward()` and "
                "`agreement.apply()`, or gradients were computed with `torch.autograd.grad`. Call "
                "`agreement.clear()` where votes are to be forgotten with their gradients."
            )
        if self.unvoted == "allow":
            return
        missing = [
            self._names[i]
            for i, parameter in enumerate(self._parameters)
            if parameter.requires_grad
            and parameter.grad is not None
            and i not in self._ledger
            and bool(parameter.grad.any())
        ]
        if not missing:
            return
        names = ", ".join(f"`{name}`" for name in missing)
        raise NotVotedOnError(
            f"Parameters {names} have a gradient on which no environment voted. Either the forward "
            "pass did not run inside of `with agreement.observe(env):`; or its data were made "
            "inside, from nothing (make them before); or an operation was not seen: reentrant "
            "checkpointing (use `use_reentrant=False` with "
            "`context_fn=agreement.checkpoint_contexts`), a custom `autograd.Function` (use "
            "`agreement.backward(environment_losses)`), a model compiled or scripted before "
            "(compile it under the observation). If these gradients should stay as they are, say "
            '`Agreement(..., unvoted="allow")`.'
        )

    def _check_zeroed(self) -> None:
        """Check that no gradient is one that the last apply left, as its part has had its votes."""
        if self.unvoted == "allow":
            return
        left = [
            name
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
            and getattr(parameter.grad, LEFT, None) == parameter.grad._version
        ]
        if left:
            raise NotVotedOnError(
                f"Parameters {', '.join(f'`{name}`' for name in left)} still have the gradient "
                "that the last `agreement.apply()` left, and this backward pass would add to it. "
                "Call `optimizer.zero_grad()` before. To accumulate over several batches, call "
                "`agreement.apply()` once, after the last of them. Freeze parameters that no "
                "optimizer holds (`requires_grad_(False)`), or leave them out of the agreement."
            )

    def _check_conserved(self) -> None:
        """Check that gradients are what the observed operations gave them.

        Each parameter once, and again after 2, 4, 8, ... steps, as a model may take another path.
        """
        for i, (expected, uses) in self._watched.items():
            gradient = self._parameters[i].grad
            if gradient is None or i not in self._ledger or not uses:
                continue  # without a use, its votes came through slots
            # In direction only: the order of applying and unscaling is free where only signs count.
            scale, rest = _compared(gradient, expected)
            if rest > CONSERVED.get(gradient.dtype, 0.05):
                raise NotVotedOnError(
                    f"A part of the gradient of `{self._names[i]}` did not come through the "
                    f"operations that were observed ({', '.join(sorted(uses))}): something else "
                    "consumed the parameter unseen (a custom `autograd.Function`, reentrant "
                    "checkpointing); or a penalty was added outside of the observation; or the "
                    "gradient was not zero before it. If that part should ride along unvoted, say "
                    '`Agreement(..., unvoted="allow")`.'
                )
            if self.rule.statistics & MAGNITUDES and bool(expected.any()) and abs(scale - 1) > 0.05:
                raise ObservationError(
                    f"The gradient of `{self._names[i]}` was multiplied by {scale:.3g} "
                    "since its backward pass (unscaled, or clipped), and "
                    f"{self.rule!r} compares it with magnitudes that were counted there. Call "
                    "`agreement.apply()` first, then `scaler.unscale_(optimizer)`, and clip last."
                )
            self._unchecked.discard(i)
        self._checks += 1
        if self._checks & (self._checks - 1) == 0:
            self._unchecked = set(range(len(self._parameters)))
        self._watching.clear()
        self._watched.clear()

    def _check_known(self) -> None:
        """Check that the model's parameters are still the ones that are tracked."""
        if self.unvoted == "allow":
            return
        known = {id(parameter) for parameter in self._parameters}
        held = {id(p): (n, p) for module in self._modules for n, p in module.named_parameters()}
        strangers = [n for i, (n, p) in held.items() if i not in known and p.grad is not None]
        if strangers:
            raise NotVotedOnError(
                f"Parameters {', '.join(f'`{name}`' for name in strangers)} came into the model "
                "after the agreement was made, and are not observed. Make the agreement once the "
                "model is complete."
            )
        left = [
            name
            for i, (name, parameter) in enumerate(self.named_parameters())
            if self._modules and i in self._ledger and id(parameter) not in held
        ]
        if left:
            raise NotVotedOnError(
                f"Parameters {', '.join(f'`{name}`' for name in left)} were voted on, and are no "
                "longer in the model: it was compiled before they were replaced. Compile it, and "
                "make the agreement, once it is complete."
            )

    # Verifying

    def verify(
        self,
        compute_loss: Callable[[Any], Tensor],
        batch: Any,
        env: EnvironmentLabels | None = None,
        *,
        tolerance: float | None = None,
    ) -> None:
        """Run the streaming way and the oracle on one batch; raise where they differ.

        The first thing to do with a new architecture. Leaves gradients, votes, the model's buffers
        and the state of torch's random generators as they were.

        Args:
            compute_loss: From a batch to the loss, as in the training loop: a mean or a sum of what
                each row loses by itself. Make dropout repeat nothing: set it to 0.
            batch: A tensor, or tensors in tuples, lists and dictionaries, with rows first.
            env: The environment of each row, as for :meth:`observe`.
            tolerance: How small, relative to the largest in its parameter, a component of an
                environment's gradient is for its sign not to count. By default 1e-4, or 1e-9 in
                float64.

        Raises:
            NotVotedOnError: With a line for each parameter where they differ, naming the operations
                that consumed it.
        """
        if self.batchnorm == "joint":
            raise ValueError(
                'Parameter `batchnorm` should not be "joint" to verify: rows\' shares of a joint '
                "gradient are another quantity than the gradients of separate environments. Put "
                "batch normalization in evaluation mode to verify the rest."
            )
        from consilience._verification import differences  # noqa: PLC0415

        if self._mode is not None:
            raise ObservationError("`agreement.verify` was called inside of an observation.")
        found = differences(self, compute_loss, batch, env, tolerance)
        if found:
            lines = "\n".join(f"- {line}" for line in found)
            raise NotVotedOnError(
                f"The observed votes or gradients differ from the oracle's:\n{lines}\n"
                "If an operation couples rows, or draws random numbers, use "
                "`agreement.backward(environment_losses)`; else leave the parameter out."
            )

    # Odds and ends

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the tracked parameters and their names."""
        return list(zip(self._names, self._parameters, strict=True))

    def _constants(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from module.buffers()

    def _forget_report(self) -> None:
        if self._report is not None:
            self._report._expire()
            self._report = None
        self._stepped.clear()

    def __repr__(self) -> str:
        count, size = len(self._parameters), sum(p.numel() for p in self._parameters)
        options = "".join(
            f", {name}={value!r}"
            for name, value, default in (
                ("batchnorm", self.batchnorm, None),
                ("batch_dim", self.batch_dim, 0),
                ("allow_single", self.allow_single, False),
                ("unvoted", self.unvoted, "raise"),
            )
            if value != default
        )
        return f"Agreement(<{count} parameters, {size:,} weights>, {self.rule!r}{options})"


def _active_modes() -> list[ObservingMode]:
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in stack if isinstance(mode, ObservingMode)]


@contextmanager
def _replay(mode: ObservingMode, agreement: Agreement) -> Iterator[None]:
    """Run a checkpointed forward again: the same taps, and no further uses."""
    observation = mode.observation
    observation.replaying = True
    try:
        if agreement._mode is mode:
            yield
        else:
            with mode:
                yield
    finally:
        observation.replaying = False


def _named(
    parameters: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
) -> tuple[list[tuple[str, Tensor]], list[nn.Module]]:
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters()), [parameters]
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise TypeError(
            "Parameter `parameters` should be a model or an iterable of parameters. Found "
            f"`{type(parameters).__name__}`."
        )
    named: list[tuple[str, Tensor]] = []
    for i, item in enumerate(parameters):
        name, parameter = f"parameters[{i}]", cast(Any, item)
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            name, parameter = item
        if not isinstance(parameter, Tensor) or not parameter.is_leaf:
            raise TypeError(
                "Parameter `parameters` should hold leaf tensors (or pairs of a name and one). "
                f"Found `{name}`, a {type(parameter).__name__}."
            )
        if any(parameter is found for _, found in named):
            continue
        if any(name == found for found, _ in named):
            raise ValueError(
                f"Parameter `parameters` should give every parameter a name of its own. Found two "
                f"called `{name}`. For several models, give `nn.ModuleList([model, other])`."
            )
        named.append((name, parameter))
    return named, []


def _compared(gradient: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the factor that fits a gradient best to what was expected, and what it leaves over.

    That as a share of the gradient's norm. In double precision, a part at a time.
    """
    parts = [tensor.reshape(-1).split(2**20) for tensor in (gradient, expected)]  # type: ignore[no-untyped-call]
    pairs = list(zip(*parts, strict=True))
    along = torch.stack([a.double() @ b.double() for a, b in pairs]).sum()
    size = torch.stack([b.double().square().sum() for _, b in pairs]).sum()
    scale = (along / size.clamp(min=1e-300)).clamp(min=0)
    rest = torch.stack([(a.double() - scale * b.double()).norm() for a, b in pairs]).norm()
    whole = torch.stack([a.double().norm() for a, _ in pairs]).norm()
    return float(scale), float(rest / whole)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"Parameter `{name}` should be {listed}. Found `{name} = {value!r}`.")
