import { plural } from "../../core/format";

interface WaitingProps {
  /** What the list has, such as `call`. */
  readonly what: string;
  readonly count: number;
  /** More are new than `count`. */
  readonly hasMore: boolean;
  readonly onShow: () => void;
}

/** The rows that are newer than a list. This line is there without new rows too: otherwise it would move the others. */
export function Waiting({ what, count, hasMore, onShow }: WaitingProps) {
  const news = plural(count, `new ${what}`);
  return (
    <div class="body waiting" role="status">
      {count ? (
        <span>
          <button type="button" onClick={onShow}>
            Show {hasMore ? `more than ${news}` : news}
          </button>
        </span>
      ) : (
        <span class="dim">No {what} is newer.</span>
      )}
    </div>
  );
}
