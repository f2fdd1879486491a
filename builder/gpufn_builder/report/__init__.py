"""The report of a build, as data and as a page."""
