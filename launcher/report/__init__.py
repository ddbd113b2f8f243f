"""Report the results of verbs: a report is a value, rendered on the console or as an HTML page."""
