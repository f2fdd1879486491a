"""The encoder's input for a word, and the searchable words."""

from __future__ import annotations

import zlib

LONGEST = 32  # trigrams of one word
ROWS = 4096  # of the encoder's table


def trigrams(word: str) -> list[int]:
    """Return `LONGEST` rows of the table, one for each trigram of the word; 0 is padding.

    >>> sum(row > 0 for row in trigrams("Rome"))
    4
    """
    padded = f" {word.lower()} "
    rows = [zlib.crc32(padded[start : start + 3].encode()) % (ROWS - 1) + 1 for start in range(len(padded) - 2)]
    return (rows + [0] * LONGEST)[:LONGEST]


CITIES = [
    "Accra", "Addis-Ababa", "Algiers", "Amsterdam", "Ankara", "Athens", "Baghdad", "Bangkok", "Barcelona",
    "Beijing", "Berlin", "Bogota", "Brussels", "Bucharest", "Budapest", "Buenos-Aires", "Cairo", "Casablanca",
    "Chicago", "Copenhagen", "Dakar", "Damascus", "Delhi", "Dhaka", "Dublin", "Edinburgh", "Frankfurt", "Geneva",
    "Glasgow", "Hamburg", "Hanoi", "Havana", "Helsinki", "Istanbul", "Jakarta", "Jerusalem", "Johannesburg",
    "Kampala", "Karachi", "Kinshasa", "Krakow", "Kyoto", "Lagos", "Leipzig", "Lima", "Lisbon", "Liverpool",
    "Ljubljana", "London", "Madrid", "Manchester", "Manila", "Marseille", "Melbourne", "Milan", "Montreal",
    "Moscow", "Mumbai", "Munich", "Nairobi", "Naples", "Osaka", "Oslo", "Ottawa", "Paris", "Philadelphia", "Prague",
    "Reykjavik", "Riga", "Rome", "Rotterdam", "Samarkand", "San-Francisco", "Santiago", "Sao-Paulo", "Seoul",
    "Seville", "Shanghai", "Singapore", "Sofia", "Stockholm", "Sydney", "Tallinn", "Tashkent", "Tbilisi", "Tehran",
    "Tokyo", "Toronto", "Tunis", "Valencia", "Vancouver", "Venice", "Vienna", "Vilnius", "Warsaw", "Washington",
    "Wellington", "Yerevan", "Zagreb", "Zurich",
]  # fmt: skip
