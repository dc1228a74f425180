import pytest
import yaml

from sp_bench.config.parsing import ConfigError
from sp_bench.config.yaml_text import read_yaml


@pytest.mark.parametrize("word", ["12:00:00", "1:30", "0123", "no", "Yes", "on", "-0755", "1:30.5"])
def test_a_word_that_yaml_takes_for_another_value_is_refused_with_that_value(word):
    assert read_yaml(f"a: '{word}'", "mine.yaml") == {"a": word}
    with pytest.raises(ConfigError, match=r"mine.yaml, line 2: YAML reads ") as refused:
        read_yaml(f"b: 1\na: [{word}]", "mine.yaml")
    assert f"reads {word} as {yaml.safe_load(word)!r}; quote it" in str(refused.value)


@pytest.mark.parametrize("word", ["0", "12", "0x1f", "1e-3", "0.5", "true", "12:75", "a:b", "none", "08", "1_000"])
def test_other_words_are_read_as_yaml_has_them(word):
    assert read_yaml(f"a: {word}", "mine.yaml") == {"a": yaml.safe_load(word)}


def test_aliases_may_repeat_a_block_but_not_explode():
    assert read_yaml("a: &x [1, 2]\nb: *x", "mine.yaml") == {"a": [1, 2], "b": [1, 2]}
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    with pytest.raises(ConfigError, match=r"mine.yaml, line 6: more than 100,000 values"):
        read_yaml(bomb, "mine.yaml")


@pytest.mark.parametrize("text", ["a: &a [*a]", "&a {b: *a}", "a: &a {b: {c: [*a]}}"])
def test_an_alias_inside_itself_is_refused(text):
    with pytest.raises(ConfigError, match=r"mine.yaml, line 1: \*a stands inside itself"):
        read_yaml(text, "mine.yaml")


def test_deep_nesting_is_refused():
    with pytest.raises(ConfigError, match="nested deeper than 50"):
        read_yaml("[" * 5000 + "]" * 5000, "mine.yaml")
