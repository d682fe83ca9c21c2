"""Every figure that the talks print, beside ours: rows of data, the planner's arithmetic, and the page of it."""
