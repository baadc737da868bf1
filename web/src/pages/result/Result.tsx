/** Shows a job's result: to view, compare, download, share, and create again with other
 * settings. */

import { type RefObject, useEffect, useRef, useState } from "react"
import { Link } from "wouter"
import { useQuery } from "@/api"
import type { FollowedJob, JobAnswer, Video } from "@/api/schema"
import { Button, bytes, duration, Icon, LinkButton, Status, tokens } from "@/ui"
import { words } from "@/words/en/result"
import { Expired } from "./Failure"
import { Share } from "./Share"
import { View } from "./View"

/** Milliseconds between renewals of the URLs, which are valid for 15 minutes. */
const RENEW_MS = 10 * 60_000

interface ResultProps {
  job: JobAnswer
  followed: FollowedJob
  reload: () => void
}

export function Result({ job, followed, reload }: ResultProps) {
  const [at, setAt] = useState(0)
  const stage = useRef<HTMLDivElement>(null)
  const latest = useRef(reload)
  latest.current = reload
  useEffect(() => {
    const timer = setInterval(() => latest.current(), RENEW_MS)
    return () => clearInterval(timer)
  }, [])
  const file = job.outputs[at] ?? job.outputs[0]
  const title = followed.effect_title || words.title
  if (!file && !job.text && job.values.length === 0) return <Expired job={job} followed={followed} />
  return (
    <div className="result">
      <div className="result-stage" ref={stage}>
        {file ? <View key={file.name} file={file} before={job.original} title={title} /> : <Text job={job} />}
        {file && <FullScreen stage={stage} />}
      </div>
      <div className="result-under">
        <div className="result-who">
          <div className="row">
            <h1>{title}</h1>
            <Status status="completed" pill>
              {words.ready}
            </Status>
          </div>
          <span className="mono faint result-facts">{factsOf(job, followed, at)}</span>
          {file && job.text && <Text job={job} />}
        </div>
        {job.outputs.length > 1 && <Outputs job={job} at={at} onPick={setAt} />}
        <Versions job={job} slug={followed.effect_slug} />
        <div className="result-acts">
          {followed.effect_slug && (
            <LinkButton icon="sliders" href={`/effects/${followed.effect_slug}?from=${job.id}`}>
              {words.otherSettings}
            </LinkButton>
          )}
          {file && <Share job={job} />}
          {file && (
            <LinkButton kind="go" icon="download" href={file.url} download={file.filename}>
              {words.download}
            </LinkButton>
          )}
        </div>
      </div>
    </div>
  )
}

/** The button's label changes to say what it does next. Phones need the button to leave full-screen
 * mode, because they have no Escape key. */
function FullScreen({ stage }: { stage: RefObject<HTMLDivElement | null> }) {
  const [isFull, setFull] = useState(false)
  useEffect(() => {
    const note = () => setFull(document.fullscreenElement !== null)
    document.addEventListener("fullscreenchange", note)
    return () => document.removeEventListener("fullscreenchange", note)
  }, [])
  return (
    <Button
      className="result-expand"
      icon={isFull ? "cross" : "expand"}
      label={isFull ? words.leaveFullScreen : words.fullScreen}
      onClick={() => void toggleFullScreen(stage.current)}
    />
  )
}

async function toggleFullScreen(box: HTMLElement | null): Promise<void> {
  if (document.fullscreenElement) await document.exitFullscreen()
  else await box?.requestFullscreen()
}

function factsOf(job: JobAnswer, followed: FollowedJob, at: number): string {
  const file = job.outputs[at]
  const took =
    followed.started_at && followed.completed_at
      ? (Date.parse(followed.completed_at) - Date.parse(followed.started_at)) / 1000
      : null
  return [
    file?.content_type.split("/")[1]?.toUpperCase(),
    file?.size != null ? bytes(file.size) : null,
    took === null ? null : words.madeIn(duration(took)),
    tokens(job.price_tokens),
  ]
    .filter(Boolean)
    .join(" · ")
}

function Text({ job }: { job: JobAnswer }) {
  const text =
    job.text ?? job.values.map((value) => `${value.name}: ${JSON.stringify(value.value)}`).join("\n")
  return (
    <pre className="result-text" aria-label={words.text}>
      {text}
    </pre>
  )
}

function Outputs({ job, at, onPick }: { job: JobAnswer; at: number; onPick: (at: number) => void }) {
  return (
    <div className="result-row" role="group" aria-label={words.outputs}>
      {job.outputs.map((output, place) => (
        <button
          key={output.url}
          type="button"
          className="print result-thumb"
          aria-label={words.output(output.filename)}
          aria-pressed={place === at}
          onClick={() => onPick(place)}
        >
          <Thumb url={output.small_url ?? output.url} type={output.content_type} />
        </button>
      ))}
    </div>
  )
}

function Thumb({ url, type }: { url: string; type: string | null }) {
  if (type?.startsWith("image/")) return <img src={url} alt="" loading="lazy" />
  return (
    <Icon name={type?.startsWith("video/") ? "video" : type?.startsWith("audio/") ? "sound" : "picture"} />
  )
}

/** Shows all results of the same photo, with a link to create another. */
function Versions({ job, slug }: { job: JobAnswer; slug: string | null }) {
  const video = useQuery<Video>(job.video_id ? `/api/videos/${job.video_id}` : null)
  if (!job.video_id) return null
  const results = video.data?.results.filter((result) => result.url).slice(0, 6) ?? []
  return (
    <nav className="result-row" aria-label={words.versions}>
      <span className="mono faint wide-only">{words.versions}</span>
      {results.map((result, place) => (
        <Link
          key={result.job_id}
          href={`/results/${result.job_id}`}
          className="print result-thumb"
          aria-label={words.version(results.length - place)}
          aria-current={result.job_id === job.id ? "page" : undefined}
        >
          <Thumb url={result.small_url ?? result.url ?? ""} type={result.content_type} />
        </Link>
      ))}
      {slug && (
        <Link
          href={`/effects/${slug}?from=${job.id}`}
          className="result-thumb result-more"
          aria-label={words.otherSettings}
        >
          <Icon name="plus" />
        </Link>
      )}
    </nav>
  )
}
