"""A tokenizer of whole words, without a download."""

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "hi", "yo", "who", "\n"]
SPECIAL = ["<unk>", "<end>", "<user>", "<assistant>"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"


def tokenizer(template: str | None = TEMPLATE):
    """Return a tokenizer of whole words."""
    import transformers
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(kinds.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n"), "isolated")]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        chat_template=template,
        additional_special_tokens=SPECIAL[2:],
    )
