"""The Data Coordinator: the Dataloader reads prompts, the Databuffer moves rows between workers."""
