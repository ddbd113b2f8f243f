"""The launcher: command line, supervision of runs, and reports. No module imports torch at top level."""
