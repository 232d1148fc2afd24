"""Sources of media: what folders, tables and tars hold, and their samples one by one."""
