"""The Data Coordinator: the Dataloader reads prompts, the Databuffer moves rows between workers."""

__all__ = ["databuffer", "dataloader", "layout", "source", "transport"]
