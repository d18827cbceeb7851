"""Report about runs or a study: a single HTML page with tables, figures and images."""
