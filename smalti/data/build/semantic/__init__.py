"""The step of a build that drops documents which say nearly the same as another one."""
