"""Starting, joining and watching the processes of a run."""
