"""What is wrong with a model, what it costs, and what to do: one file for each family of rules."""

from modelsummary.findings.check import check_model
from modelsummary.findings.finding import Finding, Findings
from modelsummary.findings.ruleset import RULES, Rule

__all__ = ["RULES", "Finding", "Findings", "Rule", "check_model"]
