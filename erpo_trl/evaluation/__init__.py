"""Evaluation as in section 5 of arXiv 2608.23311: six benchmarks × temperatures × Avg@k, Pass@k, Pass@1."""

from .metrics import majority_at_k, pass_at_k, summarize
from .runner import evaluate_model


__all__ = ["evaluate_model", "majority_at_k", "pass_at_k", "summarize"]
