"""Build reports of results, and render them on the console or as HTML pages."""
