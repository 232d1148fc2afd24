"""What people see of a run: panel, card, page, report, metrics. All of them show one Summary."""
