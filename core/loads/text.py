"""Prompts of real sentences: some written for this purpose, or those of the user's own file."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from core.errors import ConfigError

SENTENCES = """
The bridge was closed for three weeks while the crew replaced the bearings under the eastern span.
Could you explain why a kettle sounds different just before the water boils?
She kept the receipts in a biscuit tin, sorted by month, because the tax office had once asked twice.
Write a short letter to a landlord asking for the heating to be repaired before the end of November.
In the northern valleys the harvest begins a fortnight later, and the barns are built with steeper roofs.
What is the difference between a weighted average and a median, and when would you use each?
The train from the coast arrives at ten past seven, but on Sundays it does not run beyond the junction.
A function that reads a file line by line uses far less memory than one that loads everything at once.
My grandmother said that bread baked in a cold oven never rises properly, and I have yet to prove her wrong.
Summarise the following report in three points and mention every number that it contains.
The sensor is sampled forty times per second; readings outside the expected range are dropped and counted.
Nobody in the office could remember who had ordered the second printer, or why it stood in the kitchen.
Please translate this paragraph into plain language that a ten-year-old child would understand.
When two threads wait for each other, neither can go on, and the program appears to hang without an error.
The museum holds about four thousand maps, of which fewer than a hundred are shown at any time.
How long should I boil potatoes of different sizes so that all of them are done at the same moment?
He learned to sail on a lake so small that he had to turn around every six minutes.
The contract may be ended by either side with a notice of thirty days, in writing and without a reason.
Compare the two proposals with respect to cost, risk and the time until the first result can be seen.
After the storm the gardeners found that only the oldest trees had lost branches, and only on the west side.
A vaccine trains the immune system to recognise a germ before the germ itself has a chance to do harm.
List five questions that a good interviewer would ask a candidate for a position in customer support.
The recipe asks for two hundred grams of flour, a pinch of salt and as much patience as the cook can spare.
Water that freezes in a crack of the rock widens it a little every winter until the stone breaks.
I would like to learn the guitar, but I have only twenty minutes a day; what plan would you suggest?
The committee met on the second Tuesday of the month and postponed the decision for the fourth time.
Because the river had changed its course, the border on the old map now ran through the middle of a field.
Explain to a new colleague how to find out which change in the repository made the test fail.
The shop sells lamps, clocks and, since last spring, bicycles that have been repaired by the apprentices.
An honest summary says what was measured, how often, on which machine, and what was left out.
Our neighbours keep bees on the roof, and in July the honey tastes of the lime trees along the street.
Is it cheaper to heat a room all day at a low temperature or for a short time at a high one?
The first version of the program sorted the list again after every insertion, which was simple and far too slow.
They walked along the canal until the lights of the lock came into view and then turned back.
Give me a list of things to check before I send an important message to several thousand people.
A good map leaves out almost everything, and what it keeps is drawn a little larger than it is.
The patient reported headaches in the evening, mostly after long days in front of a screen.
Suppose a farmer has sixty metres of fence; which rectangle encloses the largest area, and why?
In the archive there is a photograph of the square before the fountain was moved to the park.
The night shift starts at ten, takes over the list of open problems and leaves its own in the morning.
Tell me about a scientific discovery that was made by accident and turned out to be useful.
Every second window had been left open, so the curtains moved as if someone were walking behind them.
The price of the ticket depends on the day, the hour and how many seats are left in the carriage.
Rewrite the last sentence so that it says the same with half as many words.
Sound travels faster through steel than through air, which is why one hears the rails before the train.
Before the library moved, the volunteers carried eleven thousand books across the street by hand.
What should I look at when I choose a used car that will be driven mostly in the city?
The lecture began with a simple experiment: two clocks on one shelf that slowly fell into step.
If the first reviewer finds a mistake that the second one missed, both of them learn something.
The island has one road, two villages and a ferry that takes the mail but not always the passengers.
"""


class Writer:
    """Sentences in random order, as many as it takes, cut to the wanted number of tokens."""

    def __init__(self, encode: Callable[[str], list[int]], file: str | None = None) -> None:
        self.encode = encode
        self.sentences = _sentences(file) if file else SENTENCES.strip().splitlines()
        self.lengths = [max(1, len(encode(sentence))) for sentence in self.sentences]

    def write(self, rng: random.Random, count: int) -> list[int]:
        """Exactly `count` token ids."""
        chosen: list[int] = []
        wanted = count
        while True:
            while wanted > 0:
                chosen.append(rng.randrange(len(self.sentences)))
                wanted -= self.lengths[chosen[-1]]
            tokens = self.encode(" ".join(self.sentences[i] for i in chosen)) if chosen else []
            if len(tokens) >= count:
                return tokens[:count]
            wanted = count - len(tokens)


def _sentences(file: str) -> list[str]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"load.text_file={file}: no such file")
    words = " ".join(path.read_text(encoding="utf-8").split())
    found = [sentence for sentence in re.split(r"(?<=[.!?])\s+", words) if sentence]
    if not found:
        raise ConfigError(f"load.text_file={file} holds no text")
    return found
