"""The dashboard for Grafana that is shipped, and what it asks Prometheus for."""

from siirl_dask.config.file import shipped

BOARD = shipped("quickstart.yaml").parent / "grafana" / "siirl.json"


def queries(board):
    """All queries of a dashboard: of its panels, and of the lists to choose from."""
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return shown + [
        variable["definition"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]
