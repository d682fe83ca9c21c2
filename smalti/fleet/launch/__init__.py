"""Where ranks can be started."""
