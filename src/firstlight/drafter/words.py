"""The words of the built-in prompt families."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";"))


TOPICS = _words(
    """gravity; photosynthesis; inflation; the water cycle; democracy; atoms; vaccines; volcanoes; sleep;
    music theory; computers; the moon; rivers; honey bees; bread; the Roman Empire; electric cars; maps;
    money; electricity; magnets; clouds; glass; forests; dogs; cats; fish; rain; snow; wind; fire; ice; black
    holes; evolution; the heart; the brain; the immune system; earthquakes; tides; the seasons; the internet;
    encryption; databases; operating systems; machine learning; recycling; solar power; nuclear energy; the
    stock market; insurance; taxes; supply and demand; the printing press; the French Revolution; the Silk
    Road; the Renaissance; ancient Egypt; the Cold War; poetry; painting; photography; theatre; chess;
    football; swimming; yoga; meditation; nutrition; vitamins; protein; coffee; tea; chocolate; cheese;
    gardening; compost; bicycles; trains; aeroplanes; ships; bridges; skyscrapers; concrete; steel; plastic;
    paper; language; grammar; memory; dreams; friendship; honesty; patience; courage; climate change; coral
    reefs; deserts; glaciers; dinosaurs; whales; penguins; butterflies; spiders; DNA; cells; bacteria;
    viruses; antibiotics; telescopes; satellites; rockets; time zones; calendars; probability; fractions;
    algebra; geometry; prime numbers"""
)
GOALS = _words(
    """learn a new language; save money each month; sleep better; prepare for a job interview; start running;
    cook rice; write a good CV; make new friends in a new city; stay focused while studying; reduce stress;
    clean a keyboard; remove a coffee stain; choose a laptop; plan a weekend trip; grow tomatoes; train a
    puppy; give a short speech; organise a small desk; fix a flat tyre; learn to swim; read more books; drink
    more water; wake up early; remember names; write a thank-you note; bake a simple cake; back up my files;
    create a strong password; learn the guitar; take better photographs; be a better listener; deal with a
    noisy neighbour; wash a wool jumper; pack a small suitcase; teach a child to read; keep houseplants alive;
    lower my energy bill; stop procrastinating; prepare for an exam; write a short story"""
)
THINGS = _words(
    """healthy breakfast foods; uses for a paper clip; famous scientists; European countries; musical
    instruments; kitchen tools; board games; programming languages; renewable energy sources; tips for a first
    date; reasons to visit Italy; common birds; indoor hobbies; fruits that are red; safety rules for cycling;
    gifts for a teacher; ways to say hello; great inventions; questions to ask in an interview; plants for a
    dark room; team activities; names for a cat; summer activities; winter sports; spices; ocean animals;
    classic novels; things to pack for camping; good habits; benefits of walking"""
)
TASKS = _words(
    """reverses a string; checks whether a number is prime; counts the vowels in a text; returns the factorial
    of a number; finds the largest number in a list; merges two sorted lists; removes duplicates from a list;
    checks for a palindrome; converts Celsius to Fahrenheit; computes the Fibonacci sequence; sums the digits
    of a number; sorts a list of words by length; counts words in a file; finds the greatest common divisor;
    flattens a nested list; computes the average of a list; swaps two variables; finds the second largest
    number; counts how often each character occurs; checks whether two strings are anagrams; returns the even
    numbers of a list; validates an e-mail address; transposes a matrix; searches a sorted list by bisection;
    capitalises each word; converts a number to binary; generates a random password; reads a CSV file; rounds
    a number; computes compound interest"""
)
NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kim",
    "Leo",
    "Mia",
    "Noah",
)
ITEMS = ("apples", "books", "pencils", "marbles", "cards", "stamps", "coins", "stickers", "shells", "cookies")
PLACES = _words(
    """France; Japan; Brazil; Canada; Egypt; Australia; India; Kenya; Norway; Mexico; Italy; Spain; Germany;
    Greece; Turkey; Peru; Chile; Thailand; Vietnam; Poland; Portugal; Sweden; Finland; Ireland; Morocco; Cuba;
    Iran; China; Russia; Argentina; Nigeria; South Africa; New Zealand; Indonesia; South Korea; Denmark;
    Austria; Hungary; Switzerland; Belgium"""
)
KINDS = (
    "short story",
    "poem",
    "haiku",
    "letter",
    "dialogue",
    "diary entry",
    "fairy tale",
    "limerick",
    "speech",
)
AUDIENCES = (
    "a child of eight",
    "a beginner",
    "my grandmother",
    "a student",
    "somebody in a hurry",
    "an expert of another field",
)
TONES = ("polite", "friendly", "formal", "short", "enthusiastic", "apologetic")
OCCASIONS = _words(
    """declining a meeting; asking for a day off; thanking a colleague; complaining about a late parcel;
    inviting friends to dinner; asking a professor for advice; cancelling a subscription; asking for a refund;
    announcing a new product; congratulating a friend on a new job; apologising for a mistake; asking for a
    discount; welcoming a new team member; reminding a client of a bill; booking a table"""
)
SUBJECTS = (
    "The committee",
    "Our team",
    "The city council",
    "A group of students",
    "The museum",
    "The small company",
)
DEEDS = _words(
    """agreed on a new budget; postponed the work on the bridge; opened a library in the old station; planted
    two hundred trees along the river; cancelled the summer festival because of the weather; hired three
    engineers from abroad; published a report about noise; raised the price of tickets; repaired the roof of
    the school; started a course for older people; collected money for the hospital; moved to a larger
    building; sold its oldest ship; found a way to save water; asked the public for ideas"""
)
FEELINGS = _words(
    """I loved this film, the actors were wonderful; The food was cold and the waiter rude; It is fine,
    nothing special; What a terrible waste of money; The best holiday that we ever had; The battery lasts only
    an hour; My son plays with it every day; Delivery took three weeks; I would buy it again; The book has no
    plot at all; The room was clean but small; A friendly and quick service"""
)
CHAT = _words(
    """Hi! How are you today?; What can you help me with?; Can you recommend a good book?; What should I have
    for dinner tonight?; I am bored. What can I do?; Tell me a joke.; Tell me something interesting.; What is
    the meaning of life?; Who are you?; I had a bad day at work.; Do you like music?; What is your favourite
    colour and why?; Should I get a cat or a dog?; How was the universe made?; Why do people dream?; Is it
    going to rain tomorrow?; Can you help me with my homework?; I want to travel. Where should I go?; What
    makes a good friend?; How do I become happier?; What is love?; I cannot sleep. Any ideas?; Give me a fun
    fact about space.; What would you do with a million dollars?; How do I know whether I should change jobs?;
    Why is the sky blue?; What is the best way to learn to cook?; Can you motivate me to exercise?; My friend
    is sad. What should I say?; What happened on this day in history?; Explain to me how planes fly.; What
    languages do people speak in Switzerland?; Write me a short birthday wish for my sister.; What is a good
    name for a coffee shop?; How long does it take to walk ten kilometres?; What is artificial intelligence?;
    Are there people on Mars?; What is the tallest mountain in the world?; How do I boil an egg?; Can you plan
    my day off?"""
)
