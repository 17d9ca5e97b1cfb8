"""What a run leaves behind under its URL: config, DAG, checkpoints, tables of rows."""
