"""The names of source files, of which several may have one."""

from assets.inputs.current import named_files


def test_files_of_one_name_are_numbered_and_keep_clear_of_names_that_look_so():
    """By hand; a hub data set among the sources has no files here."""
    names = ["a.jsonl", "b.jsonl", "a.jsonl", "a.jsonl (2)", "a.jsonl", "b.jsonl"]
    entries = [{"name": name, "sha256": str(at)} for at, name in enumerate(names)]
    found = named_files([entries[:2], {"hub": "org/pairs"}, entries[2:]])
    assert {name: entry["sha256"] for name, entry in found.items()} == {
        "a.jsonl": "0",
        "b.jsonl": "1",
        "a.jsonl (2)": "2",
        "a.jsonl (2) (2)": "3",
        "a.jsonl (3)": "4",
        "b.jsonl (2)": "5",
    }
