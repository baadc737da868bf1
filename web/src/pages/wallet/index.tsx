import { useMemo, useState } from "react"
import { Link } from "wouter"
import { api, cache, useAccountEvents, useAct, useEffectsById, usePages, useQuery } from "@/api"
import type {
  AccountAnswer,
  EffectAnswer,
  TransactionAnswer,
  Transactions,
  Videos,
  WalletSummaryAnswer,
} from "@/api/schema"
import {
  Button,
  Choices,
  CopyId,
  count,
  Empty,
  ErrorNote,
  exactTime,
  Icon,
  type IconName,
  LinkButton,
  Loaded,
  Skeleton,
  saveFile,
  shortId,
  Tokens,
  tokens,
  useTitle,
} from "@/ui"
import { byDay, dayTitle } from "@/ui/days"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/wallet"
import { csvOf, type Filter, type Kind, type Line, linesOf, TYPES } from "./rows"
import "./wallet.css"

const PAGE = 50
const CSV_ROWS_MAX = 10_000
const ICONS: Record<Kind, IconName> = { held: "clock", spent: "tick", back: "undo", added: "plus" }
const FILTERS = [
  { value: "all", label: words.all },
  { value: "spent", label: words.kinds.spent },
  { value: "back", label: words.kinds.back },
  { value: "added", label: words.kinds.added },
] as const

export default function Wallet() {
  useTitle(words.title)
  const summary = useQuery<WalletSummaryAnswer>("/api/wallet/summary")
  const readAgain = () => cache.invalidate("/api/wallet/")
  // When a job ends, its reserved tokens are consumed. The balance doesn't change, so no event
  // reports that.
  useAccountEvents((job) => job.completed_at && readAgain(), readAgain)
  return (
    <div className="page wallet">
      <aside className="wallet-side">
        <Loaded query={summary} skeleton={<BalanceComing />}>
          {(summary) => <Balance summary={summary} />}
        </Loaded>
        <section>
          <h2>{words.how}</h2>
          <p className="quiet">{words.howText}</p>
        </section>
      </aside>
      <History balance={summary.data?.balance ?? null} />
    </div>
  )
}

/** A placeholder with the size of the balance. */
function BalanceComing() {
  return (
    <div className="wallet-side">
      <section>
        <h2 className="wallet-label">{words.balance}</h2>
        <p className="wallet-balance">
          <b>…</b>
        </p>
        <Skeleton width="200px" height="20px" />
        <p className="wallet-no-top-up">
          <Skeleton height="20px" />
          <Skeleton width="50%" height="20px" />
        </p>
      </section>
      <section>
        <Skeleton height="92px" />
      </section>
    </div>
  )
}

function Balance({ summary }: { summary: WalletSummaryAnswer }) {
  const { reserved_tokens: held, top_up_url: topUp } = summary
  return (
    <>
      <section>
        <h2 className="wallet-label">{words.balance}</h2>
        <p className="wallet-balance">
          <b>{count(summary.balance)}</b> {common.tokenWord(summary.balance)}
        </p>
        <p className="quiet">{held > 0 ? words.held(tokens(held)) : words.nothingHeld}</p>
        {topUp ? (
          <LinkButton kind="go" size="large" href={topUp} outside className="wallet-top-up">
            {words.topUp}
          </LinkButton>
        ) : (
          <NoTopUp />
        )}
      </section>
      <section>
        <h2>{words.lastDays(summary.days)}</h2>
        <dl className="wallet-sums">
          <dt>{words.sums.spent}</dt>
          <dd>{count(summary.spent_tokens)}</dd>
          <dt>{words.sums.refunded}</dt>
          <dd>{count(summary.refunded_tokens)}</dd>
          <dt>{words.sums.added}</dt>
          <dd>{count(summary.added_tokens)}</dd>
        </dl>
      </section>
    </>
  )
}

/** Explains whom to ask for tokens, and for which account. */
function NoTopUp() {
  const account = useQuery<AccountAnswer>("/api/account", { freshSeconds: 60 })
  return (
    <p className="wallet-no-top-up">
      <span>{words.noTopUp}</span>
      <span className="faint">
        {words.yourId} {account.data && <CopyId id={account.data.user.id} />}
      </span>
    </p>
  )
}

function History({ balance }: { balance: number | null }) {
  const [filter, setFilter] = useState<Filter>("all")
  const pages = usePages<TransactionAnswer, Transactions>(
    "/api/wallet/transactions",
    { limit: PAGE, type: TYPES[filter] },
    (answer) => answer.transactions,
  )
  const lines = useMemo(
    () => pages.rows && linesOf(pages.rows, filter, balance, pages.hasMore),
    [pages.rows, pages.hasMore, filter, balance],
  )
  return (
    <section className="wallet-history">
      <header>
        <h1>{words.title}</h1>
        <div className="wallet-tools">
          <Choices label={words.filter} hideLabel options={FILTERS} value={filter} onChange={setFilter} />
          <Csv />
        </div>
      </header>
      <Loaded query={pages.first} skeleton={<Skeleton height="360px" />}>
        {() => (lines && lines.length > 0 ? <Lines lines={lines} /> : <Nothing filter={filter} />)}
      </Loaded>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <Button busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
          {words.more}
        </Button>
      )}
    </section>
  )
}

function Nothing({ filter }: { filter: Filter }) {
  if (filter !== "all") return <Empty title={words.noneOf(words.kinds[filter])} />
  return (
    <Empty
      title={words.none}
      act={
        <LinkButton kind="go" href="/">
          {words.toEffects}
        </LinkButton>
      }
    >
      {words.noneText}
    </Empty>
  )
}

function Lines({ lines }: { lines: readonly Line[] }) {
  const effects = useEffectsById()
  const pictures = usePictures()
  return (
    <table className="wallet-table">
      <thead>
        <tr>
          <th scope="col" colSpan={2}>
            {words.columns.what}
          </th>
          <th scope="col">{words.columns.kind}</th>
          <th scope="col" className="right wide-only">
            {words.columns.time}
          </th>
          <th scope="col" className="right">
            {words.columns.tokens}
          </th>
          <th scope="col" className="right wide-only">
            {words.columns.balance}
          </th>
        </tr>
      </thead>
      {byDay(lines, (line) => line.at).map((day) => (
        <tbody key={day.key}>
          <tr>
            <th scope="rowgroup" colSpan={6} className="wallet-day">
              {dayTitle(day.key)}
            </th>
          </tr>
          {day.rows.map((line) => (
            <OneLine
              key={line.id}
              line={line}
              effect={line.effectId ? effects.get(line.effectId) : undefined}
              picture={line.videoId ? pictures.get(line.videoId) : undefined}
            />
          ))}
        </tbody>
      ))}
    </table>
  )
}

interface OneLineProps {
  line: Line
  effect: EffectAnswer | undefined
  picture: string | undefined
}

function OneLine({ line, effect, picture }: OneLineProps) {
  const at = new Date(line.at)
  const time = at.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" })
  return (
    <tr>
      <td className="wallet-thumb">
        <span className="print">
          {picture ? (
            <img src={picture} alt="" loading="lazy" decoding="async" />
          ) : (
            <Icon name={line.kind === "added" ? "plus" : "picture"} />
          )}
        </span>
      </td>
      <td className="wallet-what">
        {line.jobId ? (
          <Link href={`/results/${line.jobId}`}>{effect?.title ?? words.prompt}</Link>
        ) : (
          <b>{words.payment}</b>
        )}
        <span className="faint">{detailOf(line)}</span>
      </td>
      <td>
        <span className={`wallet-kind is-${line.kind}`}>
          <Icon name={ICONS[line.kind]} />
          {words.kinds[line.kind]}
        </span>
      </td>
      <td className="right faint wide-only">
        <time dateTime={line.at} title={exactTime(at)}>
          {time}
        </time>
      </td>
      <td className={line.amount > 0 ? "right wallet-amount is-plus" : "right wallet-amount"}>
        <Tokens value={line.amount} sign={line.amount !== 0} />
      </td>
      <td className="right faint wide-only">{line.balance === null ? "" : count(line.balance)}</td>
    </tr>
  )
}

function detailOf(line: Line): string {
  if (line.kind === "added") return line.payment ?? ""
  if (line.kind === "held") return line.isOver ? words.heldBack : words.heldText
  const id = shortId(line.jobId ?? "")
  return line.kind === "back" ? `${words.notMade}, ${id}` : id
}

/** Returns the pictures of the latest media by job: the results, or else the inputs. */
function usePictures(): ReadonlyMap<string, string> {
  const media = useQuery<Videos>("/api/videos", { query: { limit: 100, urls: true }, freshSeconds: 300 })
  return useMemo(() => {
    const pictures = new Map<string, string>()
    for (const item of media.data?.videos ?? []) {
      const isPicture = item.processed_content_type?.startsWith("image/")
      const picture = item.processed_small_url ?? item.processed_file_url
      const original = item.original_small_url ?? item.original_file_url
      const url = isPicture ? picture : item.kind === "image" ? original : null
      if (url) pictures.set(item.id, url)
    }
    return pictures
  }, [media.data])
}

function Csv() {
  const effects = useEffectsById()
  const load = useAct(async () => {
    const all: TransactionAnswer[] = []
    let before: number | null = null
    do {
      const query: Record<string, number | null> = { limit: 100, before }
      const page: Transactions = await api.get("/api/wallet/transactions", { query })
      all.push(...page.transactions)
      before = page.next
    } while (before !== null && all.length < CSV_ROWS_MAX)
    const title = (id: string | null) => (id && effects.get(id)?.title) ?? id
    const text = csvOf(
      words.csvHead,
      all.map((transaction) => [
        transaction.id,
        transaction.created_at,
        transaction.type,
        transaction.amount,
        transaction.job_id,
        title(transaction.effect_id),
        transaction.provider_transaction_id,
      ]),
    )
    saveFile(new Blob([text], { type: "text/csv" }), words.csvName)
  })
  return (
    <>
      <Button
        icon="download"
        busy={load.isRunning}
        aria-description={words.csvLabel}
        onClick={() => void load.run()}
      >
        {words.csv}
      </Button>
      {load.error && <ErrorNote error={load.error} />}
    </>
  )
}
