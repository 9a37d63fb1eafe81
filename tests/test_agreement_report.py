"""What a report says, and until when."""

import pytest
import torch

from consilience import Agreement, AndMask, MajoritySign, Mean
from consilience.rules import Rule


def report_of(rule, **options):
    weight = torch.ones(2, requires_grad=True)
    agreement = Agreement([("w", weight)], rule, **options)
    agreement.backward([weight.sum(), weight[0] - weight[1]])
    return agreement, agreement.apply()


def test_it_reads_as_a_line():
    _, report = report_of(AndMask(1.0))
    assert repr(report) == "Report(voters=2, kept=0.5, agreement=0.5, null_keep_rate=0.5)"


def test_what_a_rule_does_not_count_is_none():
    _, report = report_of(Mean())
    assert (report.kept, report.agreement) == (1.0, None)
    assert "agreement=None" in repr(report)


def test_a_rule_without_numbers_of_its_own():
    class Half(Rule):
        def __call__(self, tally):
            return tally.gradient / 2

    _, report = report_of(Half())
    assert report.voters == 2
    assert report.null_keep_rate is None
    assert repr(report).startswith("Report(voters=2")


def test_it_is_read_before_the_next_observation():
    agreement, late = report_of(AndMask(1.0))
    ((_, weight),) = agreement.named_parameters()
    weight.grad = None
    agreement.backward([weight.sum(), weight.sum()])
    assert repr(late) == "Report(<not read in time>)"
    with pytest.raises(RuntimeError, match="not read before the next observation"):
        late.kept  # noqa: B018


def test_what_was_read_stays():
    agreement, report = report_of(MajoritySign())
    kept = report.kept
    agreement.clear()
    assert report.kept == kept
    assert report.parameters["w"].size == 2
    assert "not read" not in repr(report)
