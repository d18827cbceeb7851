"""What runs, studies, evaluations and predictions hold, put together for a report."""
