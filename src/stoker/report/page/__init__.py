"""HTML page of a run: its sections as markup, its plots as SVG, and its style sheet and script."""
