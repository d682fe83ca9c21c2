"""Standard errors, intervals, averages and paired comparisons of scores."""
