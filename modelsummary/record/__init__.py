"""The record of a forward: its calls of modules and functions, and the values between them, from one or more runs.

Stages and graphs are made of it. The rows of tables are made by the package ``capture``, from one run.
"""
