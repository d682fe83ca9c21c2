"""The queue of runs: their states, the rows in the database, and which of them start and stop next."""
