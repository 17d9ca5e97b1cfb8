"""Data Coordinator: the data's life. Loads prompts (Dataloader), moves rows between workers (Databuffer)."""
