"""Algorithms: their options and formulas, without torch. To add one is to add a file: docs/algorithms.md."""
