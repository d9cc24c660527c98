"""The console in a browser, on the compact stack: each page's main job, and that nothing leaves this machine."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest
from axe_playwright_python.sync_playwright import Axe
from freshet_client import Client, Filter, Interaction, Item, NotFound
from playwright.sync_api import Browser, Page, WebSocketRoute, expect, sync_playwright

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.operation_log import Control
from services.contracts.topics.dead_letters import dead_letter
from services.contracts.topics.experiments import CONSOLE
from services.contracts.topics.interactions import INTERACTIONS, encode_interaction
from services.contracts.topics.interactions import Interaction as StoredInteraction
from services.contracts.topics.version_sets import OPERATIONS
from services.encoder.config import EncoderSettings
from services.gateway.edge.api_keys import create_key
from services.gateway.edge.roles import Role
from services.offline.backfill.jobs import run_warming
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.records import DeadLetter, SourceRecord
from services.stack import Ports, Stack
from services.stack.version_sets import remove_set
from services.user_state.values import now_ms
from tests.unit.cli.shell import shown

pytestmark = pytest.mark.integration

CHROMIUM = "/usr/bin/chromium"
HORIZON_S = 1.1
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)
# Text that a page must not read as anything else: HTML, its own markup, and a mark that turns the line around.
EVIL = "<img src=x onerror=alert(1)> [/x] {{7*7}} \u202eevil"
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, small_bundle: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("console")
    stack = Stack(folder, bundle=small_bundle, ports=Ports.free(), profile="compact", console=True)
    stack.up()
    yield stack
    stack.down()


@pytest.fixture
def client(running: Stack) -> Iterator[Client]:
    with Client(running.address("gateway")) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, running: Stack, **context: object) -> Iterator[OpenPage]:
    """Opens pages; at the end, none of them has complained or asked another machine."""
    problems: list[str] = []
    base = running.console_address
    tab = browser.new_context(viewport={"width": 1280, "height": 900}, **context)
    tab.set_default_timeout(WAIT_MS)

    def open_page(path: str = "/", prepare: Callable[[Page], None] = lambda page: None) -> Page:
        page = tab.new_page()
        prepare(page)
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda asked: problems.append(asked.url) if base not in asked.url else None)
        page.goto(base + path)
        return page

    yield open_page
    tab.close()
    assert [one for one in problems if not one.startswith(("data:", f"ws{base[4:]}"))] == []


@pytest.fixture
def open_page(browser: Browser, running: Stack) -> Iterator[OpenPage]:
    with opened(browser, running) as open_page:
        yield open_page


def titles(page: Page) -> list[str]:
    return page.locator(".card .title").all_inner_texts()


def wait_for_cards(page: Page, wanted: list[str]) -> None:
    expect(page.locator(".card .title")).to_have_text(wanted)


def wait_for_answer(page: Page, ask: Callable[[], list[str]], among: str = ".card .title") -> list[str]:
    """Reload until the texts are what the gateway answers, which changes while events arrive; the texts."""
    shown = page.locator(among)
    for _ in range(20):
        wanted = ask()
        try:
            expect(shown).to_have_text(wanted, timeout=1_000)
        except AssertionError:
            page.reload()
        else:
            return wanted
    raise AssertionError(f"wanted {ask()}, found {shown.all_inner_texts()}")


def act(page: Page, kind: str, place: int) -> str:
    """Press a card's button; the title on the card. Returns when the list reflects it."""
    card = page.locator(".card").nth(place)
    title = card.locator(".title").inner_text()
    card.locator(f".act.{kind}").click()
    expect(page.locator(".card .title", has_text=re.compile(f"^{re.escape(title)}$"))).to_have_count(0)
    return title


def test_what_is_done_changes_the_list_and_the_page_says_after_how_long(open_page: OpenPage, client: Client) -> None:
    user = f"u-{uuid4().hex}"
    page = open_page(f"/?user={user}")
    expect(page.locator(".card")).to_have_count(12)
    liked = act(page, "like", 2)
    expect(page.get_by_role("status")).to_have_text(re.compile(r"^The like is in this list, [\d,]+ ms later\.$"))
    hidden = act(page, "hide", 0)
    expect(page.locator(".did .isolated")).to_have_text([hidden, liked])
    stored = client.user(user)
    assert [(one.title, one.type) for one in stored.events] == [(hidden, "hide"), (liked, "like")]
    page.get_by_role("button", name=f"Undo: {hidden}").click()
    expect(page.get_by_role("status")).to_have_text(re.compile("^The undo is in this list"))
    expect(page.locator(".did .isolated")).to_have_text([liked])
    assert [one.title for one in client.user(user).events] == [liked]
    wait_for_answer(page, lambda: [one.title for one in client.recommend(user, k=12, with_details=True).items])


def wait_for(what: str, look: Callable[[], object]) -> None:
    """Wait until it is so; an item that is not known yet is not."""
    deadline, found = time.monotonic() + WAIT_MS / 1000, None
    while not found:
        assert time.monotonic() < deadline, what
        with suppress(NotFound):
            found = look()
        time.sleep(0.05)


def wait_for_looks(client: Client, user: str, surfaces: set[str]) -> None:
    """Wait until the log has answers of these surfaces that results do not count."""

    def found() -> bool:
        shown = client.exposures(user, max_answers=100).answers
        return {one.surface for one in shown if one.context.get("surface") == CONSOLE} == surfaces

    wait_for(f"answers of {surfaces} in the log", found)


def test_pages_filters_words_and_similar_items_are_the_gateways(open_page: OpenPage, client: Client) -> None:
    user = f"u-{uuid4().hex}"
    client.session(user).record(client.recommend(user, k=1).item_ids[0], "like")
    page = open_page(f"/?user={user}")

    def ranked(k: int, **more: Filter) -> list[str]:
        return [one.title for one in client.recommend(user, k=k, with_details=True, **more).items]

    first = wait_for_answer(page, lambda: ranked(12))
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".card")).to_have_count(24)
    assert titles(page)[:12] == first
    assert len(set(titles(page))) == 24
    category = client.catalogue().categories[0].name
    page.locator(".chip", has_text=category).first.click()
    allowed = Filter(allow_categories=[category])
    wait_for_answer(page, lambda: ranked(len(titles(page)), filter=allowed))
    assert f"category={category.replace(' ', '+')}" in page.url
    expect(page.locator(f'.chip[aria-pressed="true"] >> text="{category}"')).to_have_count(1)
    words = first[0].split()[0]
    page.get_by_label("Words").fill(words)
    page.get_by_label("Words").press("Enter")
    wait_for_answer(page, lambda: [one.title for one in client.search(words, 12, user_id=user, filter=allowed).results])
    expect(page.get_by_label("Words")).to_have_value(words)
    page.get_by_role("button", name=re.compile("^Similar: ")).last.click()
    expect(page.locator(".said h2")).to_have_text(re.compile("^Like "))
    page.wait_for_url(re.compile("like="))
    like = page.url.partition("like=")[2].partition("&")[0]
    wait_for_answer(page, lambda: [one.title for one in client.similar(like, 12, user_id=user, filter=allowed).items])
    expect(page.get_by_label("Words")).to_have_value("")
    code = page.locator(".snippet pre")
    page.get_by_text("This list as curl and Python").click()
    expect(code.first).to_contain_text("GatewayService/Similar")
    expect(code.last).to_contain_text("client.similar(")
    wait_for_looks(client, user, {"recommend", "search", "similar"})


def test_of_a_visitor_the_list_follows_and_nothing_is_written(open_page: OpenPage, client: Client) -> None:
    page = open_page("/?user=somebody")
    expect(page.locator(".card")).to_have_count(12)
    page.get_by_role("button", name="A visitor without an id").click()
    expect(page.locator(".said h2")).to_have_text("For a visitor")
    liked = act(page, "like", 1)
    expect(page.get_by_role("status")).to_have_text(re.compile("^The like is in this list"))
    expect(page.locator(".did .isolated")).to_have_text([liked])
    expect(page.locator(".did button")).to_have_count(0)
    page.get_by_role("button", name="Somebody new").click()
    expect(page.locator(".said h2")).to_have_text(re.compile("^For guest-[0-9a-f]{6}$"))
    expect(page.locator(".did")).to_have_count(0)
    assert client.user("somebody").num_events == 0


def test_a_users_history_is_what_was_written_and_they_can_be_forgotten(open_page: OpenPage, client: Client) -> None:
    user, items = f"u-{uuid4().hex}", client.recommend("anybody", 60, with_details=True).items
    session = client.session(user)
    for number, item in enumerate(items[:55]):
        session.record(item.item_id, "rating", float(number % 5 + 1))
    assert session.recommend(k=1).token_honoured
    wait_for("the answer is in the topic exposures", lambda: client.exposures(user).answers)
    page = open_page(f"/user?user={user}")
    rows = page.locator(".event")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Show older").click()
    expect(rows).to_have_count(55)
    newest = [(one.title, f"rating {number % 5 + 1}") for number, one in enumerate(items[:55])][::-1]
    names, kinds = (rows.locator(of).all_inner_texts() for of in ("a", ".tag"))
    assert list(zip(names, kinds, strict=True)) == newest
    expect(page.get_by_text("55 events in the history; 55 items count as seen.")).to_be_visible()
    wait_for_answer(
        page,
        lambda: [one.title for one in client.recommend(user, 10, with_details=True).items],
        '[aria-label="The list now"] li',
    )
    shown = page.get_by_label("What was shown").locator("li")
    expect(shown.first).to_contain_text("recommend, model ")
    expect(shown.last.locator("a")).to_have_text([client.exposures(user).answers[-1].items[0].title])
    page.get_by_role("button", name="What would be removed").click()
    expect(page.get_by_text("55 events in the history", exact=True)).to_be_visible()
    assert client.user(user).num_events == 55
    page.get_by_role("button", name="Forget all of it").click()
    expect(page.get_by_role("status")).to_have_text("Forgotten.")
    expect(rows).to_have_count(0)
    assert client.user(user).num_events == 0
    page.reload()
    expect(page.get_by_text("Nothing is stored of this user.")).to_be_visible()


def test_why_says_the_place_the_parts_and_what_keeps_an_item_out(open_page: OpenPage, client: Client) -> None:
    user, gone = f"u-{uuid4().hex}", f"gone-{uuid4().hex}"
    session, items = client.session(user), client.recommend("anybody", 3, with_details=True).items
    for item in items:
        session.record(item.item_id, "like")
    third = session.recommend(k=3, with_details=True).items[2]
    page = open_page(f"/why?user={user}&item={third.item_id}")

    def verdict() -> list[str]:
        place = session.recommend(k=100).item_ids.index(third.item_id) + 1
        return [f"It is number {place} of this user's list now."]

    def shares() -> list[str]:
        told = session.explain(third.item_id)
        return [f"{share:.0%}" for share in (told.share_of_model, told.share_of_refreshed, told.share_of_votes)]

    wait_for_answer(page, verdict, ".verdict")
    expect(page.locator(".pair strong").first).to_have_text(third.title)
    wait_for_answer(page, shares, ".legend strong")
    expect(page.get_by_label("Because this user had").locator("a")).to_have_text([one.title for one in items[::-1]])
    field = page.get_by_label("Item id")
    field.fill(items[0].item_id)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".verdict.out")).to_contain_text("this user had it already")
    page.get_by_label("Item id").fill(third.title)
    page.get_by_role("button", name="Ask").click()
    page.wait_for_url(f"**/why?user={user}&item={third.item_id}")
    page.get_by_label("Item id").fill(gone)
    page.get_by_label("Item id").press("Enter")
    expect(page.locator(".verdict.out")).to_contain_text("withdrawn, not available, or unknown")


def test_events_are_on_the_live_page_without_a_reload(open_page: OpenPage, client: Client) -> None:
    item_id, user = client.recommend("anybody", 1).item_ids[0], f"u-{uuid4().hex}"
    page = open_page("/live")
    total = page.get_by_text(re.compile(r"events are in the stream\."))
    expect(total).to_be_visible()
    written = int(total.inner_text().partition(" ")[0].replace(",", ""))
    client.record(*(Interaction(user, item_id, "like") for _ in range(1_500)))
    expect(page.get_by_text(f"{written + 1_500:,} events are in the stream.")).to_be_visible(timeout=WAIT_MS)
    expect(page.get_by_text("Every event that was written is applied.")).to_be_visible(timeout=WAIT_MS)
    expect(page.locator(".plot canvas")).to_have_count(3)
    # Once the tail reads: it shows what is written from then on.
    tail = page.get_by_label("As they come")
    expect(tail.get_by_text("others since the first look")).to_be_visible()
    title, other = client.get_item(item_id).item.item.title, f"u-{uuid4().hex}"
    line = tail.locator("li", has_text=other[:24])
    deadline = time.monotonic() + WAIT_MS / 1000
    while not line.count():
        assert time.monotonic() < deadline, tail.inner_text()
        client.record(Interaction(other, item_id, "like"))
        page.wait_for_timeout(1_500)
    expect(line.first.locator("a").last).to_have_text(title)
    line.first.locator("a").first.click()
    page.wait_for_url(f"**/user?user={other}")


def test_what_is_typed_stays_while_the_page_connects_and_changes(open_page: OpenPage) -> None:
    connections: list[WebSocketRoute] = []

    def delay(page: Page) -> None:
        page.route_web_socket(re.compile("_nicegui_ws"), lambda route: connections.append(route))

    page = open_page("/?user=", prepare=delay)
    user, words = page.get_by_label("User id"), page.get_by_label("Words")
    user.fill("typed early")
    words.fill("half a wo")
    while not connections:
        page.wait_for_timeout(10)
    connections[0].connect_to_server()
    expect(page).to_have_url(re.compile("/$"))  # The page's scripts ran: the last one shortens the address.
    user.press("Enter")
    expect(page.locator(".said h2")).to_have_text("For typed early")
    variety = page.get_by_label("Variety")
    variety.fill("0.3")
    page.wait_for_url(re.compile("variety=0.3"))
    act(page, "like", 0)
    assert [field.input_value() for field in (user, words, variety)] == ["typed early", "half a wo", "0.3"]


def test_a_part_that_stops_is_named_with_the_next_command_until_it_is_back(open_page: OpenPage, running: Stack) -> None:
    page, root = open_page("/health"), running.place.state.root
    tile, verdict = page.locator(".tile", has_text="encoder"), page.locator(".verdict")
    expect(page.locator(".tile strong")).to_have_text(
        ["gateway", "redis", "candidates", "reranker", "generator", "kafka", "encoder", "refresher"]
    )
    expect(verdict).to_contain_text("Every part is ready")
    running.stop("encoder")
    expect(tile).to_have_text(re.compile("not ready$"))
    expect(verdict).to_have_text(
        re.compile(r"^encoder is not ready: no answer at \S+ \(UNAVAILABLE\)\. Meanwhile users")
    )
    expect(page.locator(".snippet pre")).to_have_text(f"freshet up --only encoder --state {root}")
    tile.click()
    expect(page.get_by_role("heading", name="encoder, by the minute")).to_be_visible()
    expect(page.locator(".plot canvas")).to_have_count(4)
    running.start("encoder", timeout_s=120.0)
    expect(verdict).to_contain_text("Every part is ready")
    expect(page.locator(".snippet")).to_have_count(0)


def test_a_dead_letter_is_replayed_once_after_a_second_look(
    open_page: OpenPage, running: Stack, client: Client
) -> None:
    user, item_id = f"u-{uuid4().hex}", client.recommend("anybody", 1).item_ids[0]
    producer = BulkProducer(running.kafka_bootstrap)
    value = encode_interaction(StoredInteraction(user_id=user, item_id=item_id, event_time_ms=now_ms(), type="like"))
    ((partition, offset),) = producer.send_many([Record(INTERACTIONS, user.encode(), value, [])])
    source = SourceRecord(INTERACTIONS, partition, offset, 1_700_000_000_000, user.encode(), value, [])
    producer.send_many([dead_letter(DeadLetter(source, f"internal error {EVIL}"))])
    name = f"{INTERACTIONS}:{partition}:{offset}"
    page = open_page("/health")
    letter = page.locator(".letter", has_text=name)
    expect(letter).to_contain_text(f"internal error {EVIL}")
    letter.get_by_role("button", name=f"Look at a replay of {name}").click()
    again = page.get_by_role("dialog", name="Look again")
    expect(again).to_contain_text(f"As event {partition}-{offset} it counts once.")
    again.get_by_role("button", name="Write it again").click()
    replayed = letter.get_by_text(re.compile(rf"^Replayed to {INTERACTIONS}:{partition}:\d+\.$"))
    said = replayed.inner_text()
    page.goto(f"{running.console_address}/live")
    page.go_back()
    expect(letter.get_by_text(said)).to_be_visible()
    expect(letter.get_by_role("button")).to_have_count(0)
    ((_, end),) = producer.send_many([Record(INTERACTIONS, user.encode(), value, [])])
    assert int(said.rpartition(":")[2].rstrip(".")) == end - 1
    producer.close()


def test_an_experiment_is_created_compared_stopped_and_its_results_are_the_commands(
    open_page: OpenPage, client: Client, running: Stack
) -> None:
    name = f"few-{uuid4().hex[:6]}"
    page = open_page("/experiments")
    page.get_by_text("A new experiment").click()
    draft = page.get_by_label(re.compile("^The experiment, as for"))
    draft.fill("name: Bad")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("alert")).to_contain_text("arms")
    draft.fill(
        f"name: {name}\nlayer: {name}\narms:\n- {{name: control, share: 0.5}}\n"
        "- {name: few, share: 0.5, max_per_category: 1}"
    )
    page.get_by_role("button", name="Create").click()
    panel = page.get_by_label(name, exact=True)
    expect(panel.locator(".tag")).to_have_text("created")
    expect(panel.locator("li")).to_have_text(["control, 50%: the defaults", "few, 50%: max per category 1"])
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("alert")).to_contain_text(name)
    panel.get_by_role("button", name="Start").click()
    expect(panel.locator(".tag")).to_have_text("running")
    people = [f"{name}-{number}" for number in range(280)]
    for number, user in enumerate(people):
        answer = client.recommend(user, 3, context={"device": "phone" if number % 7 == 0 else "tv"})
        client.record(Interaction(user, answer.item_ids[0], "like", exposure_id=answer.exposure_id))
    last_shown_s = time.monotonic()
    panel.get_by_role("link", name="What differs").click()
    field = page.get_by_label("User ids")
    field.fill(f"{people[0]}, {people[1]}")
    field.press("Enter")

    def of_arms() -> list[str]:
        asked = {"with_details": True, "context": {"surface": "console"}}
        answers = [client.recommend(people[0], 5, arms={name: arm}, **asked) for arm in ("control", "few")]
        return [one.title for answer in answers for one in answer.items]

    wait_for_answer(page, of_arms, f'[aria-label="{people[0]}"] ol a')
    expect(page.locator(".verdict")).to_contain_text("of 2 people differ")
    # Exposures wait in the gateway's memory before they are written.
    wait_for("the last exposure is in the log", lambda: client.exposures(people[-1]).answers)
    # A user counts when the horizon after the first exposure is over before the end.
    time.sleep(max(0.0, last_shown_s + HORIZON_S + 0.2 - time.monotonic()))
    page.get_by_label(name, exact=True).get_by_role("button", name="Stop").click()
    expect(page.get_by_label(name, exact=True).locator(".tag")).to_have_text("stopped")
    page.get_by_label(name, exact=True).get_by_role("link", name="Results").click()
    expect(page.locator("pre")).to_have_text(
        f"freshet results {name} --metric click --follow --state {running.place.state.root}"
    )
    counted = (name, "--metric", "like", "--horizon-hours", f"{HORIZON_S / 3600:.6f}", "--publish")
    shown("results", *counted, "--state", running.place.state.root)
    table = page.get_by_label("By arm")
    # The page asks again by itself.
    expect(table).to_be_visible(timeout=WAIT_MS)
    made = json.loads((running.place.state.results / f"{name}.json").read_text())
    arms = made["parts"][0]["arms"]
    assert sum(one["users"] for one in arms.values()) == len(people)
    for place, (arm, one) in enumerate(arms.items()):
        cells = table.locator("tr").nth(place + 1).locator("th, td")
        expect(cells.nth(0)).to_have_text(arm)
        expect(cells.nth(1)).to_have_text(str(one["users"]))
    expect(table.locator("tr").last.locator("td").nth(4)).to_contain_text("[")
    expect(page.locator(".plot canvas")).to_have_count(1)
    page.get_by_label("Answers").select_option("device tv")
    page.wait_for_url(re.compile("part=device"))
    expect(page.get_by_text("A part is one more look")).to_be_visible()
    expect(page.get_by_label("By arm").locator("tr").nth(1).locator("td").first).to_have_text(
        str(made["parts"][1]["arms"]["control"]["users"])
    )
    assert [one["name"] for one in made["parts"]] == ["", "device tv"]
    found = Axe().run(page).response["violations"]
    page.goto(f"{running.console_address}/experiments")
    expect(page.get_by_label(name, exact=True)).to_be_visible()
    found += Axe().run(page).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_rules_are_tried_first_and_two_tabs_do_not_overwrite_each_other(open_page: OpenPage, client: Client) -> None:
    user, before = f"u-{uuid4().hex}", client.rules()
    session, items = client.session(user), client.recommend("anybody", 3).item_ids
    for item_id in items:
        session.record(item_id, "like")
    last = session.recommend(k=100, with_details=True).items[-1]
    page, other = open_page(f"/rules?users={user}"), open_page("/rules")
    editor = page.get_by_label("Rules, as in a rules file")
    written = f"rules:\n- name: first\n  item_ids: ['{last.item_id}']\n  pin: 1\n"
    editor.fill(written.replace("pin", "colour"))
    page.get_by_role("button", name="Before and after").click()
    expect(page.get_by_role("alert")).to_contain_text("rules[0].colour='an unknown key'")
    editor.fill(written)
    page.get_by_role("button", name="Before and after").click()
    expect(page.get_by_role("heading", name="1 of 1 lists change")).to_be_visible()
    lists = page.get_by_label(f"User {user}").locator("ol")
    expect(lists.nth(1).locator("li").first).to_contain_text(f"{last.title}new")
    assert client.rules() == before
    try:
        page.get_by_role("button", name="Save for all users").click()
        expect(page.get_by_role("status")).to_contain_text(f"Saved as revision {before.revision + 1};")
        says = f"first: puts at position 1 the best of items {last.item_id}"
        expect(page.get_by_label("Standing rules").locator("li")).to_have_text([says])
        answer = client.recommend(user, 1)
        assert (answer.item_ids, answer.provenance.rules_revision) == ([last.item_id], before.revision + 1)
        unsaved = other.get_by_label("Rules, as in a rules file")
        unsaved.fill("rules: []")
        other.get_by_role("button", name="Save for all users").click()
        expect(other.get_by_role("alert")).to_contain_text("Somebody else changed this")
        expect(unsaved).to_have_value("rules: []")
        assert client.rules().revision == before.revision + 1
        other.reload()
        expect(other.get_by_label("Standing rules").locator("li")).to_have_text([says])
    finally:
        client.put_rules(before.rules, expected_revision=client.rules().revision)


@pytest.fixture
def staged(running: Stack, client: Client, next_bundle: Path) -> Iterator[Path]:
    """A second model, staged as set `next` beside a user who has no state of it."""
    session = client.session("of the first model")
    session.record(client.recommend("anybody", 1).item_ids[0], "like")
    assert session.recommend(k=1).token_honoured
    shown("model", "stage", "next", "--bundle", next_bundle, "--state", running.place.state.root)
    yield next_bundle
    remove_set(running, "next")


def test_a_model_is_tried_promoted_and_rolled_back_each_step_after_a_second_look(
    open_page: OpenPage, client: Client, running: Stack, staged: Path
) -> None:
    def model() -> str:
        return client.recommend("of the first model", 1).provenance.model_version

    def take(step: str) -> None:
        page.get_by_role("button", name=step).click()
        again.get_by_role("button", name="Do it").click()
        expect(page.get_by_role("status")).to_contain_text("Done")

    page, first_model = open_page("/models"), model()
    first, new = (page.get_by_label(f"Set {name}").locator(".verdict") for name in ("first", "next"))
    expect(new).to_have_text("Answers nobody yet.")
    again = page.get_by_label("Look again")
    page.get_by_role("button", name="Promote next").click()
    expect(again).to_contain_text("Set next answers everybody. Set first stays beside it")
    again.get_by_role("button", name="Not now").click()
    expect(again).to_be_hidden()
    page.get_by_label("Canary: % of users").fill("20")
    page.get_by_role("button", name="Canary next").click()
    expect(again).to_contain_text("Set next answers 20% of users")
    assert client.version_sets().revision == 1
    again.get_by_role("button", name="Do it").click()
    expect(new).to_have_text("Answers 20% of users (canary).")
    expect(first).to_have_text("Answers 80% of users.")
    page.get_by_role("button", name="Promote next").click()
    again.get_by_role("button", name="Do it").click()
    expect(page.get_by_role("alert")).to_contain_text("freshet model warm next")
    page.get_by_role("button", name="Roll back").click()
    expect(again).to_contain_text("The canary ends: set first answers everybody.")
    # Meanwhile another operator asks the set beside: this page's step is refused, and the next one is taken.
    client.change_version_set("shadow", "next", share=0.5, expected_revision=2)
    again.get_by_role("button", name="Do it").click()
    expect(page.get_by_role("alert")).to_contain_text("expected_revision=2 allowed: 3")
    page.reload()
    take("Roll back")
    redis_url, kafka = running.redis_url, running.kafka_bootstrap
    run_warming(EncoderSettings(bundle=staged, kafka_bootstrap=kafka, redis_url=redis_url))
    take("Promote next")
    expect(new).to_have_text("Answers everybody.")
    expect(first).to_have_text("Answered before the last promotion.")
    assert model() == load_bundle(staged, verify=False).model_version
    take("Roll back")
    expect(first).to_have_text("Answers everybody.")
    assert model() == first_model
    take("Retire next")
    expect(new).to_have_count(0)
    last = Control(kafka, OPERATIONS).read().last
    assert last is not None
    assert (last.operation, last.operator) == ("retire next", "a caller without a key")


def test_an_item_is_found_edited_withdrawn_and_two_tabs_lose_nothing(open_page: OpenPage, client: Client) -> None:
    new, category = f"{EVIL} {uuid4().hex}", f"c-{uuid4().hex}"
    client.put_items([Item(new, EVIL, [category, "second"])])
    wait_for("the item is known", lambda: client.get_item(new))
    page = open_page("/items?newest=1")
    page.get_by_label("Category", exact=True).fill(category)
    page.get_by_label("Category", exact=True).press("Enter")
    page.wait_for_url(re.compile("category="))
    expect(page.locator(".found a")).to_have_text([EVIL])
    page.locator(".found a").click()
    page.wait_for_url(re.compile("item="))
    other = open_page(page.url[page.url.index("/items") :])
    for tab in (page, other):
        expect(tab.get_by_label("Item", exact=True).locator("h2")).to_have_text(EVIL)
        expect(tab.get_by_text(re.compile(r"^It is new: 0 of \d+ people"))).to_be_visible()
    page.get_by_label("Title").fill("A title")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_have_text("Saved: title.")
    other.get_by_label("Categories, one a line").fill(f"{category}\nthird")
    other.get_by_role("button", name="Save").click()
    expect(other.get_by_role("status")).to_have_text("Saved: categories.")
    expect(other.get_by_label("Title")).to_have_value("A title")
    other.get_by_role("button", name="Withdraw").click()
    expect(other.get_by_role("status")).to_contain_text("Saved: withdrawn. No answer contains")
    wanted = Item(new, "A title", (category, "third"), available=True, withdrawn=True)
    assert client.get_item(new).item.item == wanted
    other.get_by_role("button", name="Restore").click()
    expect(other.get_by_role("button", name="Withdraw")).to_be_visible()
    assert not client.get_item(new).item.item.withdrawn
    assert other.locator("#main img").count() == 0
    known = client.recommend("anybody", 1).item_ids[0]
    page.goto(page.url.partition("?")[0] + f"?item={known}")
    wait_for_answer(
        page, lambda: [one.title for one in client.similar(known, 8).items], '[aria-label="Who is like it"] a'
    )


def test_markup_in_ids_titles_and_categories_is_shown_as_text(open_page: OpenPage, client: Client) -> None:
    category = f"odd </script> {uuid4().hex}"
    client.put_items([Item(item_id=f"{EVIL}", title=EVIL, categories=[category])])
    only = Filter(allow_categories=[category])
    wait_for("the item is answered", lambda: client.recommend("anybody", 1, filter=only).item_ids == [EVIL])
    page = open_page()
    field = page.get_by_label("User id")
    field.fill(EVIL)
    field.press("Enter")
    expect(page.locator(".said h2")).to_have_text(f"For {EVIL}")
    page.get_by_label(re.compile("^Another of")).fill(category)
    page.get_by_label(re.compile("^Another of")).press("Enter")
    wait_for_cards(page, [EVIL])
    expect(page.locator(".tag").first).to_have_text(category)
    act(page, "like", 0)
    expect(page.locator(".did .isolated")).to_have_text([EVIL])
    page.reload()
    expect(page.locator(".said h2")).to_have_text(f"For {EVIL}")
    assert [one.item_id for one in client.user(EVIL).events] == [EVIL]
    assert page.locator("#main img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_checker_of_accessibility_finds_nothing_serious(browser: Browser, running: Stack, scheme: str) -> None:
    with opened(browser, running, color_scheme=scheme, reduced_motion="reduce") as open_page:
        page = open_page("/?user=checked")
        expect(page.locator(".card")).to_have_count(12)
        act(page, "like", 0)
        found = Axe().run(page).response["violations"]
        item = page.locator(".card").first.get_attribute("data-item")
        others = (
            ("/user?user=checked", ".event"),
            (f"/why?user=checked&item={item}", ".legend"),
            (f"/items?item={item}", ".found"),
            ("/live", "canvas"),
            ("/health", ".tile"),
            ("/models", ".verdict"),
            ("/rules", ".editor"),
        )
        for path, there in others:
            page.goto(running.console_address + path)
            expect(page.locator(there).first).to_be_visible()
            found += Axe().run(page).response["violations"]
    serious = {one["id"]: one["nodes"] for one in found if one["impact"] in ("serious", "critical")}
    assert serious == {}, json.dumps(serious)[:3000]


def test_a_narrow_screen_scrolls_in_one_direction(browser: Browser, running: Stack) -> None:
    with opened(browser, running) as open_page:
        page = open_page("/?user=narrow")
        page.set_viewport_size({"width": 390, "height": 844})
        expect(page.locator(".card")).to_have_count(12)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.goto(f"{running.console_address}/items?item={page.locator('.card').first.get_attribute('data-item')}")
        expect(page.get_by_label("Who is like it").locator("a")).to_have_count(8)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.goto(f"{running.console_address}/health")
        expect(page.locator(".tile")).to_have_count(8)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for path, there in (("/models", ".verdict"), ("/rules", ".editor")):
            page.goto(running.console_address + path)
            expect(page.locator(there).first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_gateway_that_is_away_is_said_and_the_page_works_again(open_page: OpenPage, running: Stack) -> None:
    page = open_page("/?user=patient")
    expect(page.locator(".card")).to_have_count(12)
    shown, health = titles(page), open_page("/health")
    expect(health.locator(".tile")).to_have_count(8)
    running.stop("gateway")
    expect(health.locator(".verdict")).to_have_text(
        re.compile("^gateway is not ready: .* Meanwhile nobody is answered")
    )
    expect(health.locator(".snippet pre")).to_have_text(f"freshet up --only gateway --state {running.place.state.root}")
    page.locator(".card .act.like").first.click()
    expect(page.get_by_role("alert")).to_contain_text("The gateway does not answer.")
    assert titles(page) == shown
    opened_without = open_page("/")
    expect(opened_without.get_by_role("alert")).to_contain_text("The page works again when it does.")
    running.start("gateway", timeout_s=120.0)
    expect(opened_without.locator(".card")).to_have_count(12)
    act(page, "like", 0)
    expect(page.locator(".notice")).to_be_hidden()
    expect(health.locator(".verdict")).to_contain_text("Every part is ready")


def test_with_keys_one_signs_in_and_may_do_what_the_key_may(
    browser: Browser, running: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    reader = create_key(keys, id="reader", roles=frozenset({Role.RECOMMEND}))
    writer = create_key(keys, id="writer", roles=frozenset({Role.RECOMMEND, Role.INGEST}))
    running.stop("gateway")
    monkeypatch.setenv("FRESHET_API_KEYS", str(keys))
    running.start("gateway", timeout_s=120.0)
    monkeypatch.delenv("FRESHET_API_KEYS")
    try:
        with opened(browser, running) as open_page:
            page = open_page()
            page.wait_for_url("**/sign-in")
            field = page.get_by_label("API key")
            field.fill("nobody's")
            field.press("Enter")
            expect(page.get_by_role("alert")).to_have_text("The gateway does not know this key.")
            field.fill(reader)
            field.press("Enter")
            expect(page.locator(".card")).to_have_count(12)
            page.goto(f"{running.console_address}/?user=reader")
            expect(page.locator(".said h2")).to_have_text("For reader")
            expect(page.locator(".card")).to_have_count(12)
            lacking = page.get_by_text(re.compile("^Read-only: your key lacks the role"))
            expect(lacking).to_contain_text("ingest")
            expect(page.locator(".card .act.like").first).to_be_hidden()
            # Of a visitor nothing is written.
            page.get_by_role("button", name="A visitor without an id").click()
            act(page, "like", 0)
            item = page.locator(".card").first.get_attribute("data-item")
            page.goto(f"{running.console_address}/live")
            expect(
                page.get_by_text("Interactions are shown to a key with the role operator or support.")
            ).to_be_visible()
            for path, role in ((f"/items?item={item}", "operator"), ("/rules", "operator"), ("/health", "operator")):
                page.goto(running.console_address + path)
                expect(lacking).to_contain_text(role)
                expect(page.get_by_role("button", name=re.compile("^(Save|Withdraw|Replay)"))).to_have_count(0)
            (cookie,) = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            assert reader not in page.content() + cookie["value"]
            # Another browser is nobody, and another key is another's.
            with opened(browser, running) as open_other:
                other = open_other()
                other.wait_for_url("**/sign-in")
                other.get_by_label("API key").fill(writer)
                other.get_by_role("button", name="Sign in").click()
                expect(other.locator(".card")).to_have_count(12)
                act(other, "like", 0)
            page.get_by_role("button", name="Sign out").click()
            page.wait_for_url("**/sign-in")
    finally:
        running.stop("gateway")
        running.start("gateway", timeout_s=120.0)
