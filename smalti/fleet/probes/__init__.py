"""Small programs that measure a machine. Each runs as a child process, the only place in the fleet room with torch."""
