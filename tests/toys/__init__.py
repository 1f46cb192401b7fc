"""Connectors from outside of the package: a source and a sink in one file each.

They are made of what CONTRIBUTING.md tells and nothing else, and are examples of its steps.
"""
