"""The loop that works by itself: steps make candidates, people judge them, good ones get children."""
