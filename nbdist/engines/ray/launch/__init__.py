"""Starting and stopping Ray, on this machine and on others."""
