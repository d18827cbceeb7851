"""One page that holds all of a report: its content as plain data, its charts as SVG, and how it becomes HTML."""
