"""Reporting: panel, card, page, report, metrics. All of them show one Summary."""
