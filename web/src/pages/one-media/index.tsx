import { Link } from "wouter"
import { cache, useAccountEvents, useEffectsById, useQuery } from "@/api"
import type { MediaResult, Video } from "@/api/schema"
import { Picture } from "@/pages/media/Print"
import { CopyId, Empty, Icon, LinkButton, Loaded, Page, Skeleton, Status, Time } from "@/ui"
import { words } from "@/words/en/media"
import "@/pages/media/media.css"
import "./one-media.css"

export default function OneMedia({ id }: { id: string }) {
  const path = `/api/videos/${encodeURIComponent(id)}`
  const media = useQuery<Video>(path)
  const readAgain = () => cache.invalidate(path)
  useAccountEvents((job) => job.video_id === id && readAgain(), readAgain)
  if (media.error && [404, 422].includes(media.error.status) && !media.data)
    return (
      <Page title={words.one.missing} className="one-media">
        <Empty title={words.one.missing} act={<LinkButton href="/media">{words.title}</LinkButton>}>
          {words.one.missingText}
        </Empty>
      </Page>
    )
  const name = media.data?.filename ?? (media.data ? words.unnamed : words.title)
  return (
    <Page
      title={name}
      className="one-media"
      head={<span className="one-media-name">{name}</span>}
      actions={
        <>
          {media.data?.original_file_url && (
            <LinkButton
              href={media.data.original_file_url}
              icon="download"
              download={media.data.filename ?? true}
            >
              {words.one.download}
            </LinkButton>
          )}
          <LinkButton kind="go" href="/">
            {words.one.again}
          </LinkButton>
        </>
      }
    >
      <p className="one-media-back">
        <Link href="/media" className="link">
          {words.one.back}
        </Link>
      </p>
      <Loaded query={media} skeleton={<Skeleton height="420px" />}>
        {(video) => <Shown media={video} name={name} />}
      </Loaded>
    </Page>
  )
}

function Shown({ media, name }: { media: Video; name: string }) {
  return (
    <div className="one-media-parts">
      <figure className="one-media-original">
        <div className="one-media-well">
          {media.original_file_url ? (
            <Original media={media} url={media.original_file_url} name={name} />
          ) : (
            <p className="quiet">{words.one.gone}</p>
          )}
        </div>
        <figcaption className="faint">
          {words.one.original}, {words.one.added} <Time at={media.created_at} /> <CopyId id={media.id} />
        </figcaption>
      </figure>
      <section>
        <h2>{words.one.results}</h2>
        {media.results.length === 0 ? (
          <Empty title={words.one.none}>{words.one.noneText}</Empty>
        ) : (
          <ul className="media-sheet">
            {media.results.map((result) => (
              <OneResult key={result.job_id} result={result} />
            ))}
          </ul>
        )}
      </section>
    </div>
  )
}

function Original({ media, url, name }: { media: Video; url: string; name: string }) {
  // biome-ignore lint/a11y/useMediaCaption: customers' uploads have no captions
  if (media.kind === "audio") return <audio src={url} controls aria-label={name} />
  if (media.kind === "image") return <img src={url} alt={name} />
  // biome-ignore lint/a11y/useMediaCaption: customers' uploads have no captions
  return <video src={url} controls playsInline aria-label={name} />
}

function OneResult({ result }: { result: MediaResult }) {
  const effect = useEffectsById().get(result.effect_id ?? "")
  const title = effect?.title ?? words.one.noEffect
  const kind = result.content_type?.split("/")[0]
  return (
    <li className="media-one">
      <Link href={`/results/${result.job_id}`}>
        <div className={`print media-print is-${result.status}`}>
          {result.url && (kind === "image" || kind === "video") ? (
            <Picture url={result.small_url ?? result.url} kind={kind} alt={title} />
          ) : (
            <span className="media-blank">
              <Icon name={kind === "audio" ? "sound" : "picture"} size={24} />
            </span>
          )}
        </div>
        <span className="media-caption">
          <span className="cut-text">{title}</span>
          <span className="faint">
            <Time at={result.submitted_at} />
          </span>
        </span>
        <Status status={result.status} />
      </Link>
    </li>
  )
}
