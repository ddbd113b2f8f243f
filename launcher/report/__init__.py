"""Show the results of verbs: a report is a value that the console and a page render."""
