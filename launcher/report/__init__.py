"""Build reports on results, and render them on the console or as HTML pages."""
