"""Rows of other packages' tasks that runs are trained on, and what their episodes say."""

from siirl_storage import open_table

from siirl_dask.datasets.importing import ImportRequest, import_data

FIRST_SEED = 5


def imported(source, to):
    import_data(ImportRequest(sources=[source], to=str(to)))
    return open_table(str(to)).to_table().to_pylist()


def turns_of(row):
    """The texts of the policy's turns; the digits task's tokens are bytes."""
    ids = row["response_ids"]
    return [text_of(ids[turn["start"] : turn["stop"]]) for turn in row["turns"]]


def text_of(ids):
    from siirl_dask.tasks.tiny_model import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    special = {*tokenizer.all_special_ids}
    return tokenizer.decode([token for token in ids if token not in special])


def what_rows_say(row):
    return {key: row[key] for key in ("data_row", "response_ids", "turns", "reward", "prompt_ids")}
