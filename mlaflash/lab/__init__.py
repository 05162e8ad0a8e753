"""Known problems, their inputs, and the judgement of a result."""
