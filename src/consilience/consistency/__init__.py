"""How hard to vary a solution is: scores, Hessian geometry and propositions."""
