"""Names of source files with repetitions."""

from assets.inputs.current import named_files


def test_named_files_numbers_repeated_names_without_collisions():
    """By hand. A hub data set among the sources is skipped."""
    names = ["a.jsonl", "b.jsonl", "a.jsonl", "a.jsonl (2)", "a.jsonl", "b.jsonl"]
    entries = [{"name": name, "sha256": str(index)} for index, name in enumerate(names)]
    files = named_files([entries[:2], {"hub": "org/pairs"}, entries[2:]])
    assert {name: entry["sha256"] for name, entry in files.items()} == {
        "a.jsonl": "0",
        "b.jsonl": "1",
        "a.jsonl (2)": "2",
        "a.jsonl (2) (2)": "3",
        "a.jsonl (3)": "4",
        "b.jsonl (2)": "5",
    }
