def say(text: str, tone: str) -> str:
    return text.upper() if tone == "loud" else text
