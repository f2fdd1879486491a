/** A list that is read again while a user looks at it. Rows stay where they are: new ones wait until the user wants them. Pure. */

export interface Row {
  readonly id: string;
}

export interface LiveList<T extends Row> {
  readonly shown: readonly T[];
  /** Rows that are not shown yet, newest first. */
  readonly waiting: readonly T[];
  /** There may be rows between `waiting` and `shown` that no answer had. */
  readonly hasGap: boolean;
}

const MOST_WAITING = 200;

export function begun<T extends Row>(page: readonly T[]): LiveList<T> {
  return { shown: page, waiting: [], hasGap: false };
}

/** The list after its first page was read again. */
export function polled<T extends Row>(list: LiveList<T>, page: readonly T[]): LiveList<T> {
  if (list.shown.length === 0) {
    return begun(page);
  }
  const { shown, waiting } = updated(list, page);
  const known = idsOf([...shown, ...waiting]);
  const added = page.filter((each) => !known.has(each.id));
  const isApart = page.length > 0 && added.length === page.length;
  const all = [...added, ...waiting];
  return { shown, waiting: all.slice(0, MOST_WAITING), hasGap: list.hasGap || isApart || all.length > MOST_WAITING };
}

/** The list after its newest rows were read again, up to a limit; `isWhole`: there are no others. Missing rows were deleted, unless they are older than
 * all that were read. */
export function reread<T extends Row>(list: LiveList<T>, page: readonly T[], isWhole: boolean): LiveList<T> {
  const read = idsOf(page);
  const rows = [...list.waiting, ...list.shown];
  const oldest = isWhole ? rows.length : rows.findLastIndex((each) => read.has(each.id));
  const present = idsOf(rows.filter((each, index) => read.has(each.id) || index > oldest));
  const waiting = list.waiting.filter((each) => present.has(each.id));
  const shown = list.shown.filter((each) => present.has(each.id));
  const known = idsOf(shown);
  const firstOlder = 1 + page.findLastIndex((each) => known.has(each.id));
  const newer = firstOlder ? page.slice(0, firstOlder) : page;
  return extended(polled({ ...list, shown, waiting }, newer), page.slice(newer.length));
}

/** The list with the present state of some of its rows. */
export function updated<T extends Row>(list: LiveList<T>, rows: readonly T[]): LiveList<T> {
  const news = new Map(rows.map((each) => [each.id, each]));
  const current = (each: T): T => news.get(each.id) ?? each;
  return { ...list, shown: list.shown.map(current), waiting: list.waiting.map(current) };
}

/** The list with the rows that waited. A list with a gap is read from its start instead. */
export function inserted<T extends Row>(list: LiveList<T>): LiveList<T> {
  return begun([...list.waiting, ...list.shown]);
}

/** The list with a further page of older rows. */
export function extended<T extends Row>(list: LiveList<T>, older: readonly T[]): LiveList<T> {
  const known = idsOf([...list.shown, ...list.waiting]);
  return { ...list, shown: [...list.shown, ...older.filter((each) => !known.has(each.id))] };
}

function idsOf(rows: readonly Row[]): ReadonlySet<string> {
  return new Set(rows.map((each) => each.id));
}
