"""The notebook as it is committed. That it runs is tested by running it: pytest --nbmake notebooks."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "analysis.ipynb"


def test_the_notebook_holds_no_outputs_and_nothing_of_the_machine_it_was_written_on():
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def test_the_notebook_names_its_campaign_once():
    source = NOTEBOOK.read_text("utf-8")
    assert source.count("results/") == 1
