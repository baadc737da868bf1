// Made by `make docs` from the control plane's OpenAPI document: change it there.

export interface AbleWorker {
  worker_id: string
  fleet: string
  can_run: boolean
  /** node_types, models and capabilities. */
  missing: Record<string, (string)[]>
}

export interface AbleWorkers {
  /** Workers that have reported what they have. */
  workers: (AbleWorker)[]
}

/** Whose key this is, what it may do, and what there is. */
export interface AccountAnswer {
  user: AccountUser
  tenant: AccountTenant
  key: KeyAnswer
  limits: AccountLimits
  /** Tokens that are not reserved. */
  balance: number
  /** Where tokens are bought, if the operator has named a place. */
  top_up_url: string | null
}

/** What the user may do at once, and how much of it is taken. */
export interface AccountLimits {
  /** Queued and running, of all kinds. */
  max_active_jobs: number
  active_jobs: number
  max_upload_bytes: number
  /** Of the whole tenant, announced uploads included. */
  max_storage_bytes: number
  used_storage_bytes: number
}

export interface AccountTenant {
  id: string
  name: string
}

export interface AccountUser {
  id: string
  name: string | null
  email: string | null
}

export interface AdminEffectAnswer {
  id: string
  slug: string
  workflow_slug: string
  title: string
  description: string
  preview_url: string | null
  price_tokens: number
  overrides: Record<string, unknown>
  locked: (string)[]
  stage: string
  provider: string
  published: boolean
  max_upload_bytes: number | null
  media_types: (string)[]
  keep_metadata: boolean
  reuse: boolean
  tags: (string)[]
  examples: (Example)[]
  last_processing_time_seconds: number | null
  typical_seconds: number | null
  created_at: string
}

export interface AdminEffects {
  effects: (AdminEffectAnswer)[]
}

export interface AdminKeyAnswer {
  id: string
  user_id: string
  name: string
  /** Its first characters. */
  prefix: string
  scopes: (Scope)[]
  created_at: string
  expires_at: string | null
  revoked_at: string | null
  last_used_at: string | null
}

export interface AdminKeys {
  /** The newest first, including revoked ones. */
  keys: (AdminKeyAnswer)[]
}

export interface AdminMadeKey {
  id: string
  user_id: string
  name: string
  /** Its first characters. */
  prefix: string
  scopes: (Scope)[]
  created_at: string
  expires_at: string | null
  revoked_at: string | null
  last_used_at: string | null
  /** Shown only once. */
  key: string
}

export interface AdminNewUpload {
  filename: string
  content_type?: string
  size: number
  tenant_id?: string | null
}

export interface AdminTransactionAnswer {
  id: number
  type: TransactionType
  /** What it adds to the balance. */
  amount: number
  job_id: string | null
  provider_transaction_id: string | null
  created_at: string
}

export interface AdminTransactions {
  /** The newest first. */
  transactions: (AdminTransactionAnswer)[]
  /** The next page: before=next; null: no more. */
  next: number | null
}

export interface AdminUpload {
  file_id: string
  upload: AdminUploadSlot
}

export interface AdminUploadSlot {
  method: string
  url: string
  headers: Record<string, string>
}

export interface AdminWalletAnswer {
  balance: number
  tenant_id: string
  user_id: string
}

export interface AdminWallets {
  /** By user. */
  wallets: (AdminWalletAnswer)[]
  /** The next page: after=next; null: no more. */
  next: string | null
}

export interface AdminWantedKey {
  /** A name for people. */
  name?: string
  /** What it may be used for. */
  scopes?: (Scope)[]
  /** null: never. */
  expires_at?: string | null
}

/** A job's settings as they were, ready to be changed and submitted again. */
export interface AgainAnswer {
  effect_id: string | null
  effect_slug: string | null
  /** null: none was taken, or it has expired. */
  video_id: string | null
  /** What a job may send as properties; files by the ids of their media. */
  properties: Record<string, unknown>
  /** As of today. */
  price_tokens: number | null
  /** What can't be taken over, for people; empty: all can. */
  problems: (string)[]
}

export interface Alert {
  kind: AlertKind
  severity: "warning" | "error"
  /** What is wrong, in one sentence. */
  message: string
  /** What to do about it. */
  todo: string
  /** Such as workflow:upscale or worker:gpu-7. */
  subject: string | null
  /** How many jobs or workers it is about. */
  count: number
}

export type AlertKind = "error_rate" | "workers_lost" | "workers_pending" | "stuck_jobs" | "poisoned_jobs" | "disk" | "maintenance" | "pool_down"

export interface Alerts {
  /** The worst first. */
  alerts: (Alert)[]
}

export interface AnswerBody {
  /** May be left out if one node asks. */
  node?: string | null
  index?: (number)[]
  choice: Choice
  backend?: string | null
  /** With `approve`, of a node that lets people pick: which, in the order wanted. */
  picked?: (number)[] | null
  /** Every item of the node that asks now gets the same answer. */
  for_all?: boolean
}

/** A file that the worker uploads to its backend; the resulting name goes to `binding`. */
export interface Asset {
  name: string
  filename: string
  url: string
  content_hash: string | null
  size: number | null
  binding: string | null
  placeholder: string | null
  is_primary_input: boolean
}

export interface AssignmentAnswer {
  slug: string
  stage: string
  workflows: (string)[]
  added: (string)[]
  removed: (string)[]
  /** What could not be checked. */
  warnings: (string)[]
}

export interface Attempt {
  at: string
  actor: string
  action: string
  details: Record<string, unknown>
}

/** One lease on the job's axis of time. */
export interface AttemptLine {
  attempt: number
  lease_number: number
  worker_id: string | null
  /** Since when it had waited for this lease. */
  queued_at: string | null
  leased_at: string
  /** When the prompt went to the backend. */
  started_at: string | null
  ended_at: string | null
  /** completed, failed, requeued, expired or cancelled; null: it goes on. */
  outcome: string | null
  message: string | null
  /** As sent; null: not reported, or deleted. */
  prompt: Record<string, unknown> | null
}

export interface AttemptSeen {
  attempt: number
  lease_number: number
  worker_id: string
  started_at: string
  /** null: deleted after the retention time. */
  prompt: Record<string, unknown> | null
}

export interface Attempts {
  /** As sent to workers; null: deleted. */
  prompt: Record<string, unknown> | null
  /** As sent, in the order of leases. */
  attempts: (AttemptSeen)[]
}

/** A backend's version, GPU, node types and models. */
export interface BackendFacts {
  kind?: string
  version?: string
  system?: BackendSystem | null
  gpu?: string | null
  gpu_memory_bytes?: number | null
  node_types?: (string)[]
  model_files?: Record<string, (string)[]>
  object_info_hash?: string | null
  object_info_size?: number | null
}

/** A machine, or a whole fleet where machines aren't shown. */
export interface BackendSeen {
  /** What `backend_affinity` of a graph's node takes. */
  name: string
  /** SLUG/STAGE */
  fleet: string
  /** Whether it takes jobs now. */
  is_online: boolean
  /** Jobs that run there, or that only it may run. */
  queue_depth: number
  /** The GPU's name; of machines only. */
  device: string | null
  /** Of the GPU; of a fleet's largest. null: not known. */
  memory_total_bytes: number | null
  memory_free_bytes: number | null
}

/** The `system` of a ComfyUI's `/system_stats`, without values that change while it runs. The names are ComfyUI's. */
export interface BackendSystem {
  os?: string
  ram_total?: number | null
  required_frontend_version?: string | null
  installed_templates_version?: string | null
  required_templates_version?: string | null
  comfy_package_versions?: (PackageVersion)[]
  python_version?: string
  pytorch_version?: string
  embedded_python?: boolean
  deploy_environment?: string
}

export interface Backends {
  backends: (BackendSeen)[]
  /** False: there are more than the first 500. */
  is_whole: boolean
}

export interface Balance {
  balance: number
}

/** A batch: its jobs counted by status, and what they cost. */
export interface BatchAnswer {
  id: string
  effect_id: string
  total: number
  /** Not in the queue yet: 5 of a batch are at a time. */
  held: number
  /** Number of jobs by status. */
  counts: Record<string, number>
  /** Percent of the jobs that have ended. */
  progress: number
  is_ended: boolean
  /** Of jobs that have not ended. */
  reserved_tokens: number
  consumed_tokens: number
  refunded_tokens: number
  created_at: string
  cancelled_at: string | null
  /** In the order of the items, a page of them. */
  jobs: (JobSummary)[]
  /** The next page: start=next; null: no more. */
  next: number | null
}

export interface Books {
  /** Everything was verified, and adds up. */
  is_sound: boolean
  /** How many drifts there are. */
  found: number
  /** The first 1,000 of them. */
  drifts: (DriftAnswer)[]
  /** Pools that are down: their ledgers were not verified. */
  pools_left_out: (string)[]
}

export interface Branch {
  id: string
  step: number
  status: CandidateStatus
  judged_by: JudgedBy | null
  score: number
  judge_score: number | null
  children: (Branch)[]
}

export type BulkAct = "cancel" | "retry" | "reprioritise"

export interface BulkAnswer {
  /** How many jobs were selected, in this call. */
  matched: number
  /** How many of them were changed. */
  done: number
  /** The others, and why not. */
  failed: (BulkFailureAnswer)[]
  /** Of a retry: the new job of each. */
  retries: Record<string, string>
  /** More match the filter: repeat with after=next. */
  next: string | null
  /** Pools that are down: their jobs are not changed. */
  pools_left_out: (string)[]
}

export interface BulkFailureAnswer {
  job_id: string
  code: string
  message: string
}

export interface BulkFilter {
  /** Default: all that can be acted on. */
  status?: (JobStatus)[]
  tenant?: string | null
  workflow?: string | null
  effect?: string | null
  worker?: string | null
  error?: string | null
  since?: string | null
  until?: string | null
}

/** Jobs by their ids, or all that match a filter. */
export interface BulkOrderBody {
  act: BulkAct
  ids?: (string)[] | null
  /** As for the list of jobs. */
  filter?: BulkFilter | null
  /** Of a reprioritisation. */
  priority?: number | null
  /** `next` of an earlier response. */
  after?: string | null
  limit?: number
  /** Only tells how many match. */
  dry_run?: boolean
}

/** A candidate that a step of a pipeline made. */
export interface CandidateAnswer {
  id: string
  /** Its number; 0 is the base. */
  step: number
  parent: string | null
  status: CandidateStatus
  /** Whose judgement the status is; null while nobody has judged it. */
  judged_by: JudgedBy | null
  /** Its rating by votes. */
  score: number
  /** What the judge of its step gave it; null if there is none. */
  judge_score: number | null
  /** Why the judge gave it none, so that a person is asked. */
  judge_error: string | null
  child_count: number
  seed: number | null
  /** The same as a text: seeds are too large for JavaScript's numbers. */
  seed_text: string | null
  /** What it was made with. */
  properties: Record<string, unknown>
  job_id: string | null
  /** The backend's id of the run: ComfyUI's `prompt_id`. */
  provider_job_id: string | null
  output_index: number
  /** Its name in listings and exports. */
  path: string
  content_type: string
  size: number
  /** Valid for 15 minutes; null for a text, and after the file was deleted. */
  url: string | null
  /** A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small as it is. */
  small_url: string | null
  /** The text that its job showed, with or instead of a picture. */
  text: string | null
  created_at: string
}

export interface CandidatePage {
  /** The oldest first, unless `sort` says otherwise. */
  candidates: (CandidateAnswer)[]
  /** The next page: after=next; null: no more. */
  next: string | null
}

/** How candidates are listed. */
export type CandidateSort = "oldest" | "best" | "score"

/** How a candidate was judged. */
export type CandidateStatus = "active" | "approved" | "rejected" | "winner"

export interface Cap {
  /** null: as many as the settings allow. */
  max_workers: number | null
}

export interface ChangedValue {
  address: string
  title: string
  before: unknown
  after: unknown
}

export interface Changes {
  /** Replaces variables of the same name. */
  variables?: Record<string, unknown> | null
  limits?: LimitsBody | null
  base_candidates?: number | null
}

/** What a user may answer to a question. */
export type Choice = "backend" | "retry" | "skip" | "fail" | "approve" | "reject"

export interface Chosen {
  /** The version for new jobs. */
  version?: number | null
  /** Accept it though published effects don't fit it; these then refuse jobs. */
  break_effects?: boolean
}

export type CompareSection = "run" | "inputs" | "nodes" | "connections" | "workflows" | "states" | "prices" | "times" | "outputs"

export interface ComparedRun {
  id: string
  graph_id: string
  graph_version: number
  name: string
  status: GraphRunStatus
  created_at: string
  /** What went in, came out and was recorded is gone. */
  is_expired: boolean
}

export interface ComparedValue {
  section: CompareSection
  name: string
  /** As a text, cut if it is long; null: there is none. */
  a: string | null
  b: string | null
  is_same: boolean
}

export interface Complete {
  dispatch_id: number
  lease_token: string
  provider_job_id?: string | null
  outputs?: (DeliveredOutput)[]
  execution_seconds?: number | null
  model_change?: "same" | "switched" | "first" | null
  filled_in?: Record<string, Record<string, unknown>> | null
  values?: (ShownValue)[]
  events?: (unknown[])[]
  report?: number | null
  unheard?: UnheardReport | null
  history?: Record<string, unknown> | null
  told_outputs?: boolean
  poll?: Poll | null
}

/** The response to complete. `next` is the response to its `poll`; without it, the worker has to poll. `polls_on`: a poll of this worker is waiting already, and no longer counts the lease that has ended. If false, a poll that waits to prefetch continues until the worker polls again. */
export interface Completed {
  ok: boolean
  next: Polled | null
  polls_on: boolean
}

/** An execution on the critical path: from the end of the one before it to its own end. */
export interface CriticalStep {
  node: string
  index: (number)[]
  start: number
  end: number
  seconds: KindSeconds
}

export interface DeliveredOutput {
  name: string
  size: number
  content_type?: string
  content_hash?: string | null
  filename?: string | null
  node_id?: string | null
  kind?: string | null
  width?: number | null
  height?: number | null
  is_stripped?: boolean
  lost_manifest?: boolean
  folder?: string | null
  subfolder?: string | null
  content?: string | null
}

export interface Deliveries {
  /** The newest first. */
  deliveries: (DeliveryAnswer)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

/** One delivery of an event to a webhook, with its attempts. */
export interface DeliveryAnswer {
  id: string
  job_id: string
  event: WebhookEvent
  status: DeliveryStatus
  tries: number
  /** The server's last response. */
  last_status: number | null
  /** Why there was no response. */
  last_error: string | null
  /** null: it has ended. */
  next_try_at: string | null
  payload: Record<string, unknown>
  created_at: string
  ended_at: string | null
}

export type DeliveryStatus = "pending" | "delivered" | "failed"

export interface Deregister {
  worker_id?: string | null
}

export interface DispatchPage {
  dispatches: (DispatchSeen)[]
  /** For older ones, repeat the call with `before` set to this. */
  next: number | null
}

export interface DispatchSeen {
  id: number
  tenant_id: string
  job_id: string
  workflow: string
  stage: string
  provider: string
  status: DispatchStatus
  priority: number
  attempts: number
  max_attempts: number
  requeues: number
  worker_id: string | null
  lease_expires_at: string | null
  not_before: string | null
  backend_affinity: string | null
  model_key: string | null
  is_poisoned: boolean
  cancel_requested: boolean
  duration_seconds: number | null
  last_error: string | null
  created_at: string
  queued_at: string
  started_at: string | null
  ended_at: string | null
}

export type DispatchStatus = "queued" | "leased" | "completed" | "failed" | "cancelled"

export interface DispatchWhole {
  dispatch: DispatchSeen
  why: string
  attempts: (Attempt)[]
}

/** The response to complete, fail, requeue and deregister; a repeated call gets the same. */
export interface Done {
  ok: boolean
}

export interface Drain {
  /** False: the same as undrain. */
  is_draining?: boolean
}

export interface Drawing {
  nodes: (DrawnNode)[]
  links: (DrawnLink)[]
  groups: (DrawnGroup)[]
}

export interface DrawnGroup {
  title: string
  x: number
  y: number
  width: number
  height: number
}

export interface DrawnLink {
  from_node: string
  from_slot: number
  to_node: string
  to_slot: number
  type: string
}

export interface DrawnNode {
  id: string
  type: string
  title: string
  is_subgraph: boolean
  x: number
  y: number
  width: number
  height: number
  mode: "always" | "muted" | "bypassed"
  inputs: (DrawnSlot)[]
  outputs: (DrawnSlot)[]
}

export interface DrawnSlot {
  name: string
  /** Empty where it isn't known. */
  type: string
}

export interface DriftAnswer {
  fault: Fault
  tenant_id: string
  user_id: string | null
  job_id: string | null
  message: string
}

/** An effect as customers see it. `properties` is a JSON Schema of what a job may set. */
export interface EffectAnswer {
  /** The effect_id for a job. */
  id: string
  slug: string
  title: string
  description: string
  preview_url: string | null
  /** Reserved at submit, and due on success. */
  price_tokens: number
  /** The median of the latest runs; null before the first. */
  typical_seconds: number | null
  /** Of the latest run; null before the first. */
  last_processing_time_seconds: number | null
  /** null: it needs no media, and so no video_id. */
  takes: Takes | null
  /** JSON Schema (2020-12) of what a job may send as properties, in the order of a form. x-kind of each says how people enter it: text, multiline, number, integer, boolean, choice, seed, colour, image, mask, video, audio. */
  properties: Record<string, unknown>
  tags: (string)[]
  /** The first is the one to show. */
  examples: (Example)[]
  /** Whether the balance of the key's user covers the price. */
  can_pay: boolean
}

export interface Entries {
  /** The newest first. */
  entries: (EntryAnswer)[]
  /** The next page: before=next; null: no more. */
  next: number | null
}

export interface EntryAnswer {
  id: number
  at: string
  actor: string
  action: string
  subject: string
  tenant_id: string | null
  details: Record<string, unknown>
}

export interface ErrorSeen {
  node: string
  index: (number)[]
  /** The backend that runs it, where backends are shown; otherwise the one that it is bound to. */
  backend: string | null
  message: string
  /** For one that is bound to a backend. */
  alternatives: (string)[]
  /** Of an error that no retry solves; null for all others. */
  code: RunErrorCode | null
  /** What a person must do before a new run can succeed; null where that isn't known. */
  action: string | null
}

/** What an operator shows of an effect: what went in, and what came out. */
export interface Example {
  before: ExampleMedia | null
  after: ExampleMedia | null
}

export interface ExampleMedia {
  /** Served by us, without a key; it never changes, so cache it. */
  url: string
  content_type: string
  /** In bytes. */
  size: number
  /** Of a picture, in pixels. */
  width: number | null
  height: number | null
}

export interface ExecutionSeen {
  node: string
  index: (number)[]
  status: ExecutionStatus
  attempts: number
  /** Of its last attempt. */
  job_id: string | null
  /** Why it waits, if no worker can run it now. */
  why: string | null
  /** The backend that runs it, where backends are shown; otherwise the one that it is bound to. */
  backend: string | null
  progress: number
  current_step: string | null
  inputs: Record<string, unknown> | null
  outputs: Record<string, unknown> | null
  /** False: inputs and outputs were left out because the response would be too large. */
  has_values: boolean
  error: string | null
  /** Of a failed node, where backends are shown. */
  traceback: string | null
  notes: (string)[]
  /** Its result was there already: it has no job, and cost nothing. */
  reused_from: ReusedFrom | null
  queued_at: string | null
  started_at: string | null
  ended_at: string | null
}

export type ExecutionStatus = "pending" | "held" | "queued" | "running" | "moving" | "asking" | "stopping" | "done" | "skipped" | "failed" | "cancelled"

/** The settings of an effect; fields that are left out stay as they are, or get their default. */
export interface FaceBody {
  /** A title for people; default: the slug. */
  title?: string | null
  description?: string | null
  /** A picture or video of the result. */
  preview_url?: string | null
  /** The price of a job; default: 0. */
  price_tokens?: number | null
  /** Values of properties in place of the workflow's defaults. */
  overrides?: Record<string, unknown> | null
  /** Properties that customers can't see or set. */
  locked?: (string)[] | null
  /** Of the fleets that run it; production. */
  stage?: string | null
  provider?: "self_hosted" | "cloud" | null
  /** Whether customers see it. */
  published?: boolean | null
  /** The largest media that it accepts. */
  max_upload_bytes?: number | null
  /** Such as image/png; empty: all types of its kind. */
  media_types?: (string)[] | null
  /** Whether results keep the prompt and workflow; default: false. */
  keep_metadata?: boolean | null
  /** Equal results are taken; default: false. */
  reuse?: boolean | null
  /** By which customers choose; lower-case. */
  tags?: (string)[] | null
}

/** What the backend has, if that has changed. */
export interface FactsReport {
  worker_id: string
  tokens: (string)[]
  backend?: BackendFacts | null
}

export interface FactsReported {
  object_info_upload: OutputSlot | null
}

/** Asks a worker to read its backend's node types and models, and to report by /facts. The tokens of the requests that came before the reading began are reported with it. An urgent request follows a call that may have changed the backend. */
export interface FactsWanted {
  tokens: (string)[]
  is_urgent: boolean
}

/** Reports a failed run. Without an error, the customer sees a general message. */
export interface Fail {
  dispatch_id: number
  lease_token: string
  error?: string | Record<string, unknown>
  provider_job_id?: string | null
  interrupted?: boolean
  execution_seconds?: number | null
  filled_in?: Record<string, Record<string, unknown>> | null
  events?: (unknown[])[]
  report?: number | null
  unheard?: UnheardReport | null
  outputs?: (DeliveredOutput)[]
  told_outputs?: boolean
}

/** The response to fail. */
export interface FailAnswer {
  ok: boolean
  ignored_fields: (string)[]
}

export interface FailureAnswer {
  job_id: string
  step: string
  parent: string | null
  /** It should have judged `parent`, which a person judges now. */
  is_judge: boolean
  error: string | null
  ended_at: string | null
}

export interface Failures {
  /** The newest first. */
  failures: (FailureAnswer)[]
}

export type Fault = "balance" | "negative" | "no_wallet" | "settled_twice" | "not_reserved" | "amount" | "not_settled" | "settled_early" | "settled_wrongly"

export interface FileSeen {
  /** The property or output. */
  name: string
  filename: string
  /** null: not asked for, or the file is gone. */
  url: string | null
  size: number | null
  content_type: string | null
}

export interface FireBody {
  /** What a webhook would send. */
  body?: unknown
  /** The same key gives the same firing. */
  idempotency_key?: string | null
}

/** One firing of a trigger: the run that it started, or why there is none. */
export interface FiringAnswer {
  id: string
  trigger_id: string
  cause: FiringCause
  status: FiringStatus
  /** Of a schedule. */
  planned_at: string | null
  run_id: string | null
  /** How the run stands. */
  run_status: string | null
  /** What the run may spend. */
  max_tokens: number
  error_code: string | null
  error: string | null
  /** How many moments were missed. */
  missed: number
  created_at: string
  ended_at: string | null
}

export type FiringCause = "schedule" | "catch_up" | "webhook" | "hand"

export type FiringStatus = "starting" | "started" | "refused" | "missed"

export interface Firings {
  /** The newest first. */
  firings: (FiringAnswer)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

export interface FleetAnswer {
  slug: string
  stage: string
  max_workers: number | null
  approval: string
  /** How long its machines take to start on demand. */
  starts_within_seconds: number | null
  /** How many have joined. */
  workers: number
  /** Slugs of the workflows assigned to it. */
  workflows: (string)[]
  /** Of what its backends last reported. */
  object_info_hash: string | null
  created_at: string
}

export interface FleetDetails {
  slug: string
  stage: string
  max_workers: number | null
  approval: string
  /** How long its machines take to start on demand. */
  starts_within_seconds: number | null
  /** How many have joined. */
  workers: number
  /** Slugs of the workflows assigned to it. */
  workflows: (string)[]
  /** Of what its backends last reported. */
  object_info_hash: string | null
  created_at: string
  /** The commands that join a worker, for those who know the secret. */
  join: string
  /** Learned from finished runs. */
  model_switches: (SwitchAnswer)[]
}

/** The terms, with what the operator should know about them. */
export interface FleetPromptsAnswer {
  /** Whether it takes such prompts. */
  is_open: boolean
  /** The price of each prompt, in tokens. */
  price_tokens: number
  /** Instead of a fixed price: tokens for each second on the GPU. */
  price_per_second: number | null
  /** Node types that may run although they are denied by default. */
  allow: (string)[]
  /** Node types that may not run; stronger than any `allow`. */
  deny: (string)[]
  /** Whether node types that are not ComfyUI's own may run, unless they take a path, a URL, code or a command. */
  allows_unknown: boolean
  /** Most nodes of a prompt. */
  nodes_max: number
  /** Most bytes of a prompt, as JSON. */
  prompt_bytes_max: number
  /** A run that takes longer is stopped, and failed. */
  run_limit_seconds: number
  /** Prefixes of routes that are passed on to a worker's backend, such as /api/etn. */
  passthrough: (string)[]
  /** Whether a client's WebSocket shows its prompts one after another, in the order in which they started, as with a single ComfyUI. If false, it shows all messages at once. */
  in_order: boolean
  /** Set if prompts cost less than a registered workflow that the fleet runs. */
  warning: string | null
}

export interface FleetSecret {
  slug: string
  stage: string
  /** Workers join with it. It is shown only once. */
  secret: string
  /** The commands that join a worker beside its ComfyUI, secret included. */
  join: string
}

export interface Fleets {
  fleets: (FleetAnswer)[]
}

/** A job as a page that waits for it shows it. */
export interface FollowedJob {
  id: string
  status: JobStatus
  effect_id: string | null
  effect_slug: string | null
  effect_title: string | null
  video_id: string | null
  /** null: it has ended. */
  stage: StageName | null
  /** Always the same four, in order. */
  stages: (JobStage)[]
  /** While it waits: its place in the queue, in words. */
  why: string | null
  /** Percent, as its worker measures it; null until the first report. */
  progress: number | null
  /** Percent by the effect's history, until there is a real one; null: unknown. */
  expected_progress: number | null
  /** By the effect's history, without the wait in the queue; null: unknown, also once a run takes longer than usual. */
  seconds_left: number | null
  /** The node that runs now. */
  node: string | null
  node_title: string | null
  /** Of the node that runs now. */
  step: number | null
  steps: number | null
  /** Why it failed, for people. */
  error: string | null
  price_tokens: number
  /** What came back, if it has not succeeded. */
  refunded_tokens: number
  submitted_at: string
  started_at: string | null
  completed_at: string | null
}

export interface FollowedJobs {
  /** The newest first. */
  jobs: (FollowedJob)[]
}

export interface FoundEffect {
  id: string
  slug: string
  title: string
}

export interface FoundJob {
  id: string
  status: string
  effect_id: string | null
  video_id: string | null
  submitted_at: string
}

export type FoundKind = "job" | "worker" | "tenant" | "effect" | "workflow"

export interface FoundMedia {
  id: string
  kind: string
  /** null: it has expired. */
  filename: string | null
  created_at: string
}

export interface FoundThing {
  kind: FoundKind
  /** The id or slug by which its page is found. */
  id: string
  name: string
  /** Its status, fleet or pool. */
  detail: string
}

export interface FoundThings {
  found: (FoundThing)[]
  /** Pools that are down: their jobs are not found. */
  pools_left_out: (string)[]
}

export interface GoOn {
  /** `next` of an earlier response. */
  after?: string | null
}

/** A stored graph: its document and version. */
export interface GraphAnswer {
  id: string
  name: string
  version: number
  document: Record<string, unknown>
  /** A Mermaid diagram of it. */
  mermaid: string
}

export interface GraphPage {
  /** The newest first. */
  graphs: (GraphSummary)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

export interface GraphPort {
  name: string
  /** As in `image`, `text[]`, `result` or `any`. */
  type: string
  /** Of an input. */
  required: boolean
}

/** What a graph takes and gives, as ports of a node that has it inside. */
export interface GraphPorts {
  inputs: (GraphPort)[]
  outputs: (GraphPort)[]
}

/** A run of a graph: its status, nodes and results. */
export interface GraphRunAnswer {
  id: string
  graph_id: string
  graph_version: number
  name: string
  status: GraphRunStatus
  /** Of jobs that are in flight or done. */
  tokens: number
  max_tokens: number | null
  inputs: Record<string, unknown>
  /** By output node; files with fresh URLs. */
  outputs: Record<string, unknown> | null
  error: ErrorSeen | null
  /** It starts no jobs until it is resumed; null: it isn't paused. */
  paused_at: string | null
  questions: (QuestionSeen)[]
  progress: ProgressSeen
  nodes: (NodeSeen)[]
  executions: (ExecutionSeen)[]
  executions_total: number
  /** The graph as it was run, where it was asked for. */
  document: Record<string, unknown> | null
  created_at: string
  ended_at: string | null
  /** Its retention time is over: inputs, outputs and records were deleted. */
  is_expired: boolean
  /** The run whose results it has taken, if it is a rerun. */
  rerun_of: RerunOf | null
}

export type GraphRunStatus = "pending" | "running" | "waiting_for_user" | "completed" | "failed" | "cancelled"

export interface GraphRunSummaries {
  /** The newest first. */
  runs: (GraphRunSummary)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

export interface GraphRunSummary {
  id: string
  graph_id: string
  graph_version: number
  /** Of its graph, as that is called now. */
  name: string
  status: GraphRunStatus
  /** Of jobs that are in flight or done. */
  tokens: number
  max_tokens: number | null
  /** Why it failed, for people. */
  error: string | null
  created_at: string
  ended_at: string | null
  /** The run whose results it has taken. */
  rerun_of: string | null
  /** It starts no jobs until it is resumed; null: it isn't paused. */
  paused_at: string | null
}

export interface GraphSummary {
  id: string
  /** Its creator, who alone may change it. */
  user_id: string
  name: string
  /** The newest. */
  version: number
  created_at: string
}

export interface HTTPValidationError {
  detail: (ValidationError)[]
}

export interface Heartbeat {
  dispatch_id: number
  lease_token: string
  started?: boolean
  progress?: Progress | null
  want_outputs?: (WantedOutput)[]
  want_assets?: (string)[]
  reading?: Reading | null
  wait_seconds?: number
  filled_in?: Record<string, Record<string, unknown>> | null
  events?: (unknown[])[]
  outputs?: (DeliveredOutput)[]
  report?: number | null
  preview?: RunPreview | null
}

export interface HeartbeatAnswer {
  lease_expires_at: string | null
  cancelled: boolean
  drain: boolean
  recall: boolean
  interrupt: boolean
  previews: boolean
  outputs: (OutputSlot)[]
  assets: (Asset)[]
  new_token: string | null
  facts_wanted: FactsWanted | null
}

export interface HeldLease {
  dispatch_id: number
  lease_token: string
}

export interface Item {
  /** As the effect's JSON Schema says. */
  properties?: Record<string, unknown>
  /** Where the effect takes media. */
  video_id?: string | null
}

/** One lease, with everything that is needed to run it. */
export interface Job {
  dispatch_id: number
  job_id: string
  lease_token: string
  lease_number: number
  attempt: number
  lease_expires_at: string
  lease_seconds: number
  provider: "self_hosted" | "cloud"
  workflow_slug: string
  tenant_id: string | null
  prompt: Record<string, unknown>
  output_node_id: string | null
  assets: (Asset)[]
  outputs: (OutputSlot)[]
  run_limit_seconds: number
  max_output_bytes: number
  extra_data: Record<string, unknown>
  secrets: Record<string, string>
  has_secrets: boolean
  model_key: string | null
  model_set: string | null
  strip_metadata: boolean
  ai_mark: string | null
  records_run: boolean
  holds_results: boolean
  live_outputs: boolean
  inline_bytes_max: number
  numbers_reports: boolean
  input_url: string | null
  output_url: string | null
  output_headers: Record<string, string> | null
  input_payload: Record<string, unknown> | null
}

/** What can be done with the job now. */
export interface JobActs {
  cancel: boolean
  retry: boolean
  reprioritise: boolean
  replay: boolean
}

/** A job: its status, its outputs, and the values that its nodes showed. */
export interface JobAnswer {
  id: string
  status: JobStatus
  effect_id: string | null
  video_id: string | null
  batch_id: string | null
  retry_of: string | null
  /** The job whose result it took instead of running, for nothing. */
  reused_from: string | null
  /** Reserved at submit; consumed on success, else refunded. */
  price_tokens: number
  /** Percent; null if unknown. */
  progress: number | null
  /** Why it failed, for people. */
  error: string | null
  submitted_at: string
  started_at: string | null
  /** When it ended, however it ended. */
  completed_at: string | null
  idempotency_key: string | null
  /** Including default values, such as a seed. */
  properties: Record<string, unknown>
  /** From the effect's history, without the wait in the queue; null: unknown, also once a run takes longer than usual. */
  estimated_seconds_left: number | null
  outputs: (Output)[]
  /** Of a job that has ended: what went in, as long as it is kept. */
  original: Output | null
  /** The first output's. */
  processed_file_url: string | null
  /** What nodes showed: texts, numbers, booleans, JSON. */
  values: (Value)[]
  /** The texts of the first node that showed any; null: none did. */
  text: string | null
  /** At submit: that it will wait, because no worker can run it now. */
  warnings: (string)[]
}

export interface JobCountsAnswer {
  /** By status. */
  counts: Record<string, number>
  /** A count that is as high stands for that many or more. */
  counted_max: number
  /** Pools that are down: their jobs don't count. */
  pools_left_out: (string)[]
}

export interface JobDetails {
  id: string
  tenant_id: string
  workflow: string
  version: number
  status: JobStatus
  error: string | null
  raw_error: string | null
  attempt: number
  properties: Record<string, unknown>
  /** By which the ComfyUI client that sent it knows it. */
  prompt_id: string | null
  /** The backend's id of the completed run: ComfyUI's `prompt_id`. */
  provider_job_id: string | null
  progress: Progress | null
  values: (ShownValue)[]
  submitted_at: string
  started_at: string | null
  completed_at: string | null
  dispatch: DispatchSeen | null
  /** Why it isn't running. */
  why: string | null
  /** Seconds after which only a person can help; null: it needs no help. */
  person_needed_after: number | null
  /** What that person must do; null: the job needs no help. */
  required_action: string | null
  user_id: string | null
  /** The slug of its effect. */
  effect: string | null
  stage: string
  provider: string
  priority: number
  backend_affinity: string | null
  reserved_tokens: number
  retry_of: string | null
  /** The job whose result it took instead of running. */
  reused_from: string | null
  media_id: string | null
  batch_id: string | null
  /** graph or pipeline, if it is a part of a run. */
  run_kind: string | null
  run_id: string | null
  /** It waits outside of the queue, for others of its user. */
  is_held: boolean
  /** As sent to workers; null: deleted. */
  prompt: Record<string, unknown> | null
  output_node_id: string | null
  inputs: (FileSeen)[]
  outputs: (FileSeen)[]
  /** In the order of leases. */
  attempts: (AttemptLine)[]
  /** The oldest first. */
  audit: (EntryAnswer)[]
  can: JobActs
}

export interface JobIds {
  ids: (string)[]
  /** Why no worker can run them now. */
  warnings: (string)[]
}

export interface JobListed {
  id: string
  tenant_id: string
  user_id: string | null
  workflow: string
  /** The slug of its effect. */
  effect: string | null
  status: JobStatus
  priority: number
  attempt: number
  /** Who has it, or had it last. */
  worker_id: string | null
  /** Of a job that runs, if its backend tells it. */
  percent: number | null
  dispatch_id: number | null
  reserved_tokens: number
  retry_of: string | null
  error: string | null
  submitted_at: string
  started_at: string | null
  completed_at: string | null
}

export interface JobPage {
  /** The newest first. */
  jobs: (JobListed)[]
  /** The next page: after=next; null: no more. */
  next: string | null
  /** Pools that are down: their jobs are not listed. */
  pools_left_out: (string)[]
}

export interface JobPreview {
  /** A picture as a data: URL; null: none came, or it does not run. */
  preview: string | null
}

export interface JobSeen {
  id: string
  tenant_id: string
  workflow: string
  version: number
  status: JobStatus
  error: string | null
  raw_error: string | null
  attempt: number
  properties: Record<string, unknown>
  /** By which the ComfyUI client that sent it knows it. */
  prompt_id: string | null
  /** The backend's id of the completed run: ComfyUI's `prompt_id`. */
  provider_job_id: string | null
  progress: Progress | null
  values: (ShownValue)[]
  submitted_at: string
  started_at: string | null
  completed_at: string | null
  dispatch: DispatchSeen | null
  /** Why it isn't running. */
  why: string | null
  /** Seconds after which only a person can help; null: it needs no help. */
  person_needed_after: number | null
  /** What that person must do; null: the job needs no help. */
  required_action: string | null
  outputs: (OutputSeen)[]
}

/** One of the four parts of a job's way. */
export interface JobStage {
  name: StageName
  state: StageState
  /** How long it took; or, until it is done, how long it usually takes; null: unknown. */
  seconds: number | null
}

export type JobStatus = "queued" | "processing" | "completed" | "failed" | "cancelled"

export interface JobSummary {
  id: string
  status: JobStatus
  effect_id: string | null
  video_id: string | null
  batch_id: string | null
  retry_of: string | null
  /** The job whose result it took instead of running, for nothing. */
  reused_from: string | null
  /** Reserved at submit; consumed on success, else refunded. */
  price_tokens: number
  /** Percent; null if unknown. */
  progress: number | null
  /** Why it failed, for people. */
  error: string | null
  submitted_at: string
  started_at: string | null
  /** When it ended, however it ended. */
  completed_at: string | null
}

export interface JobWaitAnswer {
  /** One sentence. */
  why: string
  /** Seconds after which only a person can help, because no worker can run the job; null: it needs no help. */
  person_needed_after: number | null
  /** What that person must do; null: the job needs no help. */
  required_action: string | null
}

export interface Jobs {
  /** The newest first. */
  jobs: (JobSummary)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

/** Whose judgement a candidate's status is. */
export type JudgedBy = "judge" | "person"

export interface KeyAnswer {
  id: string
  name: string
  /** Its first characters. */
  prefix: string
  scopes: (Scope)[]
  created_at: string
  expires_at: string | null
  revoked_at: string | null
  /** To the minute. */
  last_used_at: string | null
}

export interface KeySignIn {
  /** Of a user (`cf_…`) or an operator (`cfo_…`), or the admin key. */
  key: string
}

/** Seconds by kind, of all executions of a node together. */
export interface KindSeconds {
  running: number
  asking: number
  queued: number
  held: number
  retried: number
}

/** What a backend reported as missing when it refused a prompt. */
export interface Lacking {
  node_types?: (string)[]
  models?: (unknown[])[]
}

export interface Limits {
  /** Lower ones of its jobs are raised to it. */
  min_priority?: number
  /** Higher ones are lowered to it. */
  max_priority?: number
  /** Maximum number of its queued jobs. */
  max_queued?: number | null
}

/** Limits of a run; fields that are left out stay as they are, null means no limit. */
export interface LimitsBody {
  candidates?: number | null
  tokens?: number | null
  concurrent_jobs?: number
  until?: string | null
  /** Maximum size of its files; then it is paused. */
  bytes?: number | null
}

/** Where a candidate comes from, and what votes say about it. */
export interface LineageAnswer {
  /** Itself first, then its parent, the base last. */
  candidates: (CandidateAnswer)[]
  won: number
  lost: number
  tied: number
}

export interface LocalPrompt {
  /** As the last attempt sent it; null after COMFYFLEET_PROMPT_KEEP_DAYS. */
  prompt: Record<string, unknown> | null
}

export interface LocalSignIn {
  /** From the address that `comfyfleet up` or `comfyfleet open` has printed. It works once. */
  secret: string
}

export interface LocalWorkflow {
  /** The beginning of its slug, such as the file's name. */
  name: string
  /** A workflow as ComfyUI's editor saves it, a prompt, or a JSON that holds one. */
  document: Record<string, unknown>
}

export interface LocalWorkflowAnswer {
  /** What steps of pipelines name it by. */
  slug: string
  /** The types of its properties, by name. */
  properties: Record<string, string>
}

export interface MadeEffect {
  id: string
  slug: string
}

export interface MadeKey {
  id: string
  name: string
  /** Its first characters. */
  prefix: string
  scopes: (Scope)[]
  created_at: string
  expires_at: string | null
  revoked_at: string | null
  /** To the minute. */
  last_used_at: string | null
  /** Shown only once: only its hash is stored. */
  key: string
}

export interface MadeOperator {
  id: string
  name: string
  role: Role
  /** The first characters of the key. */
  prefix: string
  created_at: string
  created_by: string
  revoked_at: string | null
  last_used_at: string | null
  /** Shown only once. */
  key: string
}

/** A link that was just made, with its secret. */
export interface MadeShare {
  id: string
  job_id: string
  video_id: string | null
  /** Whether it also shows what went in, for before and after. */
  has_original: boolean
  created_at: string
  expires_at: string
  revoked_at: string | null
  /** Shown only once: only its hash is stored. */
  secret: string
  /** The page that shows it; GET /api/shared/SECRET has the same as data. */
  url: string
}

export interface MadeTenant {
  id: string
  name: string
  /** The tenant database where it is stored. */
  pool: string
  /** The key of its first user, shown only once. */
  key: string
  /** Its first user. */
  user_id: string
}

export interface MadeTrigger {
  id: string
  name: string
  kind: TriggerKind
  graph_id: string | null
  /** null: the newest. */
  version: number | null
  pipeline_id: string | null
  /** Of a pipeline's runs. */
  base_candidates: number | null
  inputs: Record<string, unknown>
  cron: string | null
  timezone: string
  catch_up: boolean
  tokens_per_day: number
  /** Of one run. */
  max_tokens: number | null
  /** Today, in its time zone; open runs count with all they may spend. */
  used_tokens: number
  is_paused: boolean
  /** The tokens of its day are used up; it starts nothing until the next. */
  is_spent: boolean
  /** Of a schedule that is not paused. */
  next_at: string | null
  /** Moments at which no control plane ran. */
  missed: number
  /** The newest of them. */
  missed_at: string | null
  /** Where webhooks are sent to. */
  path: string | null
  created_at: string
  /** Of a webhook. Shown only once. */
  secret: string | null
}

export interface MadeWebhook {
  id: string
  url: string
  events: (WebhookEvent)[]
  /** false: switched off after days of failed deliveries; switch it on with …/activate. */
  is_active: boolean
  created_at: string
  /** Shown here and by …/secret only. Every delivery is signed with it (HMAC-SHA256). */
  secret: string
}

export interface Maintenance {
  on: boolean
}

export interface Matrix {
  workflows: (MatrixWorkflow)[]
  workers: (MatrixWorker)[]
  /** false: there are more workers or workflows than are shown. */
  is_whole: boolean
}

export interface MatrixWorker {
  worker_id: string
  fleet: string
  state: string
  /** Slugs of workflows. */
  can_run: (string)[]
  /** By workflow: node_types, models and capabilities that it lacks. */
  missing: Record<string, Record<string, (string)[]>>
  /** Workflows of which nobody knows, as it has not told what its backend has. */
  unknown: (string)[]
}

export interface MatrixWorkflow {
  workflow: string
  /** SLUG/STAGE of those that it is assigned to. */
  fleets: (string)[]
  /** How many workers that are online can run it. */
  able: number
  /** How many of its fleets' workers are online. */
  online: number
}

/** One job that was run on a media, with its first output. */
export interface MediaResult {
  job_id: string
  effect_id: string | null
  status: JobStatus
  /** The first output; valid for 15 minutes. */
  url: string | null
  /** A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small as it is. */
  small_url: string | null
  content_type: string | null
  submitted_at: string
}

export type MediaStatus = "uploaded" | "queued" | "processing" | "completed" | "failed" | "expired" | "cancelled"

export interface MissingInFile {
  node_types: (string)[]
  files: (string)[]
}

export interface Model {
  /** Class.input; empty where the node type isn't known. */
  input: string
  file: string
}

export interface NamedNode {
  id: string
  type: string
  title: string
}

export interface NewBatch {
  effect_id: string
  /** A job for each; all of them are accepted, or none. */
  items: (Item)[]
  /** The same key and body again give the same job; with another body: 409. */
  idempotency_key?: string | null
}

export interface NewEffect {
  /** A title for people; default: the slug. */
  title?: string | null
  description?: string | null
  /** A picture or video of the result. */
  preview_url?: string | null
  /** The price of a job; default: 0. */
  price_tokens?: number | null
  /** Values of properties in place of the workflow's defaults. */
  overrides?: Record<string, unknown> | null
  /** Properties that customers can't see or set. */
  locked?: (string)[] | null
  /** Of the fleets that run it; production. */
  stage?: string | null
  provider?: "self_hosted" | "cloud" | null
  /** Whether customers see it. */
  published?: boolean | null
  /** The largest media that it accepts. */
  max_upload_bytes?: number | null
  /** Such as image/png; empty: all types of its kind. */
  media_types?: (string)[] | null
  /** Whether results keep the prompt and workflow; default: false. */
  keep_metadata?: boolean | null
  /** Equal results are taken; default: false. */
  reuse?: boolean | null
  /** By which customers choose; lower-case. */
  tags?: (string)[] | null
  /** Lower-case letters, digits, ., - and _; at most 100. */
  slug: string
  /** Of the registered workflow behind it. */
  workflow_slug: string
}

export interface NewFleet {
  /** Lower-case letters, digits, - and _; at most 60. */
  slug: string
  /** Fleets of one slug may have several stages. */
  stage?: string
  /** Maximum number of workers; default: COMFYFLEET_MAX_FLEET_WORKERS. */
  max_workers?: number | null
  /** manual: a new worker gets no job until an operator approves it. */
  approval?: "auto" | "manual"
}

export interface NewGraphRunBody {
  /** By input node. A file is named by its id, or by that of its media. */
  inputs?: Record<string, unknown>
  /** Default: the newest. */
  version?: number | null
  /** Spending limit: no job starts that could exceed it. */
  max_tokens?: number | null
  /** The same key gives the same run. */
  idempotency_key?: string | null
  /** The graph, as an object or as a text in JSON or YAML. */
  document: Record<string, unknown> | string
}

export interface NewJob {
  effect_id: string
  /** The media that the effect is applied to, if it takes any. */
  video_id?: string | null
  /** The same key and body again give the same job; with another body: 409. */
  idempotency_key?: string | null
  /** As the effect's JSON Schema says. A file is named by the id of its media. */
  properties?: Record<string, unknown>
}

export interface NewJobs {
  workflow_slug: string
  /** Default: the newest. */
  version?: number | null
  /** Default: the tenant `default`. */
  tenant_id?: string | null
  properties?: Record<string, unknown>
  /** By property. */
  files?: Record<string, string>
  stage?: string
  provider?: "self_hosted" | "cloud"
  priority?: number
  /** worker:ID or fleet:SLUG/STAGE */
  backend_affinity?: string | null
  count?: number
}

export interface NewKey {
  worker_id: string
  /** The worker's new key, shown only once. */
  token: string
}

export interface NewMediaShare {
  /** In seconds. */
  expires_in?: number
  /** Whether it also shows what went in, for before and after. */
  has_original?: boolean
  /** Which result of the media; default: its latest. */
  job_id?: string | null
}

export interface NewPerson {
  /** The name in the audit. */
  name: string
  role?: Role
}

export interface NewPipeline {
  name?: string | null
  /** In order; see the concepts page for their fields. */
  steps?: (Record<string, unknown>)[] | null
  /** Instead: all of it as an object, or as a text in YAML or JSON. */
  document?: Record<string, unknown> | string | null
}

export interface NewPipelineRunBody {
  base_candidates: number
  variables?: Record<string, unknown>
  target_folder?: string | null
  limits?: LimitsBody
  /** The same key and body again give the same job; with another body: 409. */
  idempotency_key?: string | null
}

export interface NewPriority {
  priority: number
}

export interface NewShare {
  /** In seconds. */
  expires_in?: number
  /** Whether it also shows what went in, for before and after. */
  has_original?: boolean
}

export interface NewTenant {
  /** A name for people; calls use the id. */
  name: string
  /** Of its first user. */
  email?: string | null
}

export interface NewTriggerBody {
  /** A name for people. */
  name: string
  /** Its id or name; this or a pipeline. */
  graph?: string | null
  /** Of the graph; default: the newest at each firing. */
  version?: number | null
  /** Its id or name. */
  pipeline?: string | null
  /** Of a pipeline's runs. */
  base_candidates?: number | null
  /** Of each run; a pipeline's variables. Of a webhook, a text like `body.order.photo` is a path in the body. */
  inputs?: Record<string, unknown>
  /** Five fields; without it the trigger is a webhook. */
  cron?: string | null
  /** Of the schedule, and of the day of the limit. */
  timezone?: string
  /** Whether the newest moment at which no control plane ran is fired later, once. */
  catch_up?: boolean
  /** What all runs of a day may spend together. */
  tokens_per_day: number
  /** What one run may spend. */
  max_tokens?: number | null
}

export interface NewUpload {
  /** For display; never used as a path. */
  filename: string
  content_type: string
  /** In bytes. */
  size: number
  /** If given, type and size are checked against the effect's limits. */
  effect_id?: string | null
  /** Whether to send it in parts, which are not lost when the connection is. */
  in_parts?: boolean
}

export interface NewUser {
  email?: string | null
  name?: string | null
}

/** A file that was uploaded, or a URL; exactly one of them. */
export interface NewVideo {
  /** A file that was uploaded; original_file_id means the same. */
  file_id?: string | null
  /** Or a URL to fetch it from: http or https, at a public address. */
  url?: string | null
}

export interface NewWebhook {
  /** http or https, at a public address. */
  url: string
  /** Default: all. */
  events?: (WebhookEvent)[]
}

export interface NewWorkflow {
  /** A worker must have all of them to get a job. */
  required_capabilities?: (string)[] | null
  /** How long a job may run; else COMFYFLEET_RUN_LIMIT_SECONDS. */
  run_limit_seconds?: number | null
  /** Offers it in customers' graphs and pipelines, at this price; 0: for nothing. */
  price_tokens?: number | null
  /** True: it is no longer offered; runs that go on may use it. */
  is_withdrawn?: boolean
  /** Whether a result needs a file or a value; default: required, or optional for a new workflow whose output nodes only show text. */
  output?: "required" | "optional" | null
  /** How delivered files are marked as made by AI: auto (default) decides by the prompt; generated and edited always mark; none never does. */
  ai_mark?: "auto" | "generated" | "edited" | "none" | null
  /** Lower-case letters, digits, ., - and _; a known one: its next version. */
  slug: string
  /** A workflow as ComfyUI's editor saves it, a prompt, or a JSON that holds one. */
  document: Record<string, unknown>
  /** Its named inputs. */
  properties?: (PropertyBody)[]
  /** The node whose files are the result; default: all output nodes. */
  output_node_id?: string | number | null
  /** SLUG/STAGE of the fleet to check it against; default: the fleet that knows most. */
  fleet?: string | null
  /** Register it though published effects don't fit it; these refuse jobs until they are changed. */
  break_effects?: boolean
  /** New jobs keep the version that they have: try this one, then activate it. */
  is_draft?: boolean
}

export interface NodeSeen {
  id: string
  type: string
  /** Of a node that names one. */
  workflow: string | null
  /** Of a node that names one. */
  effect: string | null
  status: ExecutionStatus
  /** How often it runs, as far as that is known. */
  expected: number
  done: number
  skipped: number
  failed: number
  cancelled: number
}

/** When a node waited, ran and ended: all its executions in one row. */
export interface NodeTimeline {
  id: string
  type: string
  /** Its workflow or effect, if it has one. */
  name: string | null
  status: ExecutionStatus
  /** That have begun to wait or to run. */
  executions: number
  expected: number
  /** The node that it waits for, or that it waited for the longest. */
  after: string | null
  /** When all its inputs were decided, for the first time. */
  ready: number | null
  /** When its last execution ended. */
  ended: number | null
  spans: (TimelineSpan)[]
  seconds: KindSeconds
  /** The index of the execution that took the longest. */
  longest: (number)[] | null
  /** It is on the critical path. */
  is_critical: boolean
}

/** A property that a node may set or connect. */
export interface OfferedProperty {
  name: string
  type: string
  /** null: none is known. */
  default: unknown
  minimum: number | null
  maximum: number | null
  step: number | null
  choices: unknown[] | null
  /** It must be set, or connected. */
  required: boolean
  description: string
}

export interface OperatorAnswer {
  id: string
  name: string
  role: Role
  /** The first characters of the key. */
  prefix: string
  created_at: string
  created_by: string
  revoked_at: string | null
  last_used_at: string | null
}

export interface Operators {
  operators: (OperatorAnswer)[]
}

/** One file that a job made, with a URL to download it. */
export interface Output {
  name: string
  filename: string
  /** The name under which a browser saves it, after what went in and the effect; null: `filename`. */
  download_name: string | null
  content_type: string
  /** In bytes. */
  size: number | null
  /** Valid for 15 minutes; repeat the call for a new one. */
  url: string
  /** A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small as it is. */
  small_url: string | null
}

export interface OutputSeen {
  name: string
  /** As the backend named it. */
  filename: string
  url: string
  size: number | null
  content_type: string
}

/** Where the worker uploads one output. */
export interface OutputSlot {
  name: string
  method: "PUT"
  url: string
  headers: Record<string, string>
}

export interface Overview {
  range: string
  step_seconds: number
  now: OverviewNow
  series: OverviewSeries
  totals: OverviewTotals
  /** The busiest first. */
  workflows: (WorkflowFigures)[]
  /** The worst first. */
  alerts: (Alert)[]
}

export interface OverviewNow {
  queued: number
  /** Jobs that have begun at a worker. */
  running: number
  /** Jobs that workers have and that have not begun. */
  held: number
  /** How long the first in line has waited. */
  oldest_seconds: number
  /** How many jobs the workers that are online run at once. */
  slots: number
  /** By state: idle, busy, draining, offline, revoked. */
  workers: Record<string, number>
  maintenance: boolean
  /** By fleet, as SLUG/STAGE: jobs in the queue that are of its workflows. One job may be of several. */
  waiting: Record<string, number>
}

/** Columns of equal length, one entry for each step; null: nothing is known of that step. */
export interface OverviewSeries {
  /** When each step begins; the last goes on. */
  at: (string)[]
  /** Jobs that waited, on average. */
  queued: (number)[]
  /** Jobs that workers held, on average. */
  running: (number)[]
  completed: (number)[]
  failed: (number)[]
  cancelled: (number)[]
  /** Of those that completed or failed. */
  success_rate: (number | null)[]
  wait_p50_seconds: (number | null)[]
  wait_p95_seconds: (number | null)[]
  run_p50_seconds: (number | null)[]
  run_p95_seconds: (number | null)[]
  /** Mean load of the GPUs of all workers. */
  gpu_percent: (number | null)[]
  /** Of the jobs that could run at once. */
  busy_percent: (number | null)[]
  /** Runs without a switch of models before them. */
  stayed: (number)[]
  switched: (number)[]
  /** What completed jobs have cost. */
  tokens: (number)[]
}

/** The same for the whole range. */
export interface OverviewTotals {
  queued: number
  running: number
  completed: number
  failed: number
  cancelled: number
  success_rate: number | null
  wait_p50_seconds: number | null
  wait_p95_seconds: number | null
  run_p50_seconds: number | null
  run_p95_seconds: number | null
  gpu_percent: number | null
  busy_percent: number | null
  stayed: number
  switched: number
  tokens: number
}

export interface PackageVersion {
  name: string
  installed?: string | null
  required?: string | null
}

export interface PairAnswer {
  /** Two of one step; empty if there are not two to compare. */
  candidates: (CandidateAnswer)[]
  /** That were given in their step. */
  votes: number
  /** After so many each was compared with five others, or with all. */
  votes_enough: number
}

export interface Payment {
  /** In tokens, above zero. */
  amount: number
  /** The payment provider's id; the same id counts once. */
  provider_transaction_id: string
  /** For the audit. */
  reason?: string | null
}

/** A stored pipeline and its document. */
export interface PipelineAnswer {
  id: string
  name: string
  document: Record<string, unknown>
  created_at: string
  /** Only when it is created: steps whose candidates would all be equal. */
  warnings: (string)[]
}

/** null is no limit. */
export interface PipelineLimits {
  candidates: number | null
  tokens: number | null
  concurrent_jobs: number
  until: string | null
  /** Maximum size of its files; then it is paused. */
  bytes: number | null
}

export interface PipelinePage {
  pipelines: (PipelineAnswer)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

/** A run of a pipeline: its status, steps and costs. */
export interface PipelineRunAnswer {
  id: string
  pipeline_id: string
  /** Its name. */
  pipeline: string
  status: PipelineRunStatus
  pause_reason: string | null
  /** Why nothing was submitted at the last check; null while the next check is due. */
  reason: string | null
  /** What prevents the next job. */
  trouble: string | null
  /** Only a person can help when the trouble has lasted for so long; null: it may pass by itself. */
  trouble_seconds: number | null
  target_folder: string
  base_candidates: number
  variables: Record<string, unknown>
  limits: PipelineLimits
  /** Reserved and consumed. */
  tokens: number
  created_at: string
  changed_at: string
  files_removed_at: string | null
  steps: (StepAnswer)[]
  /** How many there were, by state. */
  jobs: Record<string, number>
  /** Jobs that wait for a worker. */
  queued: number
  /** Of jobs that ended; null while none has. */
  success_rate: number | null
  /** Size of its files. */
  bytes: number
  /** Estimated from the duration of the last jobs. */
  seconds_left: number | null
  /** To follow what happens from now on: events?after=… */
  last_event_id: number
}

export type PipelineRunStatus = "active" | "paused" | "cancelled"

export interface PipelineRunSummaries {
  runs: (PipelineRunSummary)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

export interface PipelineRunSummary {
  id: string
  pipeline_id: string
  /** Its name. */
  pipeline: string
  status: PipelineRunStatus
  pause_reason: string | null
  /** Why nothing was submitted at the last check; null while the next check is due. */
  reason: string | null
  /** What prevents the next job. */
  trouble: string | null
  /** Only a person can help when the trouble has lasted for so long; null: it may pass by itself. */
  trouble_seconds: number | null
  target_folder: string
  base_candidates: number
  variables: Record<string, unknown>
  limits: PipelineLimits
  /** Reserved and consumed. */
  tokens: number
  created_at: string
  changed_at: string
  files_removed_at: string | null
}

export interface Poll {
  worker_id: string
  capabilities?: (string)[] | null
  current_load?: number
  max_concurrency?: number
  providers?: ("self_hosted" | "cloud")[]
  wait_seconds?: number
  held?: (HeldLease)[] | null
  models_loaded?: (string)[] | null
  model_set?: string | null
  reading?: Reading | null
  backend?: BackendFacts | null
  is_brief?: boolean
  backend_problem?: "down" | "hung" | "poisoned" | "closed" | "disk_full" | null
}

export interface Polled {
  job: Job | null
  reason: string | null
  drain: boolean
  object_info_upload: OutputSlot | null
  new_token: string | null
  facts_wanted: FactsWanted | null
}

export interface Problem {
  /** Stable; see the reference of error codes. */
  code: string
  /** For people. */
  message: string
  /** The field, the limit, or whatever explains it. */
  details: Record<string, unknown>
}

export interface ProblemAnswer {
  error: Problem
}

export interface ProblemSeen {
  /** Stable. */
  code: string
  message: string
  node: string
  port: string
}

export interface Progress {
  percent?: number | null
  node?: string | null
  step?: number | null
  steps?: number | null
  preview?: string | null
}

export interface ProgressSeen {
  overall_percent: number
  /** By how long each node typically takes. */
  weighted_percent: number
  completed_nodes: number
  total_nodes: number
  /** Nodes that are running on a backend. */
  running_nodes: (RunningNodeSeen)[]
}

export interface PropertyAnswer {
  name: string
  type: "text" | "number" | "integer" | "boolean" | "choice" | "seed" | "image" | "video" | "audio"
  binding: string | null
  placeholder: string | null
  default: unknown
  minimum: number | null
  maximum: number | null
  step: number | null
  choices: unknown[] | null
  required: boolean
  description: string
  label: string | null
  /** multiline, colour or mask */
  format: string | null
}

/** A property of a workflow. Unknown fields cause a warning in the response, as they may be misspelt. */
export interface PropertyBody {
  /** The one named `input`, of image or video, takes the user's media. */
  name: string
  type: "text" | "number" | "integer" | "boolean" | "choice" | "seed" | "image" | "video" | "audio"
  /** "<node id>.<input>", ids as in the prompt. */
  binding?: string | null
  /** Or a text in the document that is replaced by the value. */
  placeholder?: string | null
  /** Without it, a bound input keeps the document's value. */
  default?: unknown
  /** Else that of the node, for number and integer. */
  minimum?: number | null
  maximum?: number | null
  /** For those who draw a slider. */
  step?: number | null
  /** For a choice; else those of the node. */
  choices?: (string | number | boolean)[] | null
  /** Else: files, and placeholders without a default, are. */
  required?: boolean | null
  /** For people. */
  description?: string
  /** Its name in a form; else from the name. */
  label?: string | null
  /** How people enter it: multiline (text), colour (text or integer), mask (image). */
  format?: "multiline" | "colour" | "mask" | null
}

export interface PublicEffects {
  /** By slug. */
  effects: (EffectAnswer)[]
  /** Of all published effects, by name; on the first page only. */
  tags: (string)[]
  /** The next page: after=next; null: no more. */
  next: string | null
}

export interface PublicKeys {
  /** The newest first, including revoked ones. */
  keys: (KeyAnswer)[]
}

/** A question of a run: whose backend is offline, or whose node asks for approval. */
export interface QuestionSeen {
  node: string
  index: (number)[]
  message: string
  /** Backends that could replace it, the best first. */
  backends: (string)[]
  choices: (Choice)[]
  /** When it is answered without you, as the graph says. */
  deadline: string | null
  /** Of how many some may be picked; null: nothing to pick. */
  pick_from: number | null
  /** What the node costs on any backend; null: it runs no job. */
  price_tokens: number | null
}

export interface Quota {
  /** Its quota; null: COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT. */
  max_storage_bytes: number | null
}

/** The estimated price and duration of a run. */
export interface QuoteAnswer {
  tokens_min: number
  tokens_max: number
  jobs_min: number
  jobs_max: number
  seconds_min: number
  seconds_max: number
  /** Nodes that run or are skipped, each counted once per item and round. */
  executions_min: number
  executions_max: number
  /** A run that would have more executions is refused, or fails. */
  executions_limit: number | null
  /** Workflows without a measured duration. */
  unknown_durations: (string)[]
  /** Nodes that no worker can run now. */
  warnings: (ProblemSeen)[]
}

export interface QuoteBody {
  /** Without them, lists are assumed to have their maximum length. */
  inputs?: Record<string, unknown>
  version?: number | null
}

/** The machine's state at one moment; values that can't be read are None. */
export interface Reading {
  gpu_name?: string | null
  gpu_load_percent?: number | null
  gpu_memory_used_bytes?: number | null
  gpu_memory_total_bytes?: number | null
  gpu_temperature_celsius?: number | null
  cpu_percent?: number | null
  memory_used_bytes?: number | null
  memory_total_bytes?: number | null
  disk_free_bytes?: number | null
  comfyui_restarts?: number | null
}

export interface ReadingAnswer {
  at: string
  reading: Reading
}

export interface Readings {
  /** The newest first. */
  readings: (ReadingAnswer)[]
}

export interface Register {
  worker_id: string
  fleet_slug?: string | null
  stage?: string
  max_concurrency?: number
  capabilities?: (string)[]
  workflow_slugs?: (string)[] | null
  providers?: ("self_hosted" | "cloud")[]
  protocol_version?: number
  backend?: BackendFacts | null
}

export interface Registered {
  worker_id: string
  token: string
  workflows_assigned: (string)[]
  lease_seconds: number
  heartbeat_seconds: number
  object_info_upload: OutputSlot | null
}

export interface RegisteredVersion {
  slug: string
  version: number
  /** What could not be checked, and what no worker can run. */
  warnings: (string)[]
  /** What will be known later. */
  notes: (string)[]
}

export interface Repaired {
  dispatches_ended: number
  dispatches_made: number
  pools_skipped: number
  rows_read: number
  /** Continue with after=next; null: all was read. */
  next: string | null
}

export interface Replay {
  /** worker:ID or fleet:SLUG/STAGE */
  backend_affinity?: string | null
  priority?: number
}

export interface ReplayedJob {
  job_id: string
}

export interface Requeue {
  dispatch_id: number
  lease_token: string
  reason: string
  detail?: string | null
  code?: string | null
  lacking?: Lacking | null
}

export interface RerunBody {
  /** The node from which on everything runs again; without it, what has no result or has changed. */
  from?: string | null
  /** Inputs that are others than in the earlier run. */
  inputs?: Record<string, unknown>
  /** Properties of nodes for this run only, each as `node.property`. */
  set?: Record<string, unknown>
  /** Of the graph; default: as it was run. */
  version?: number | null
  /** Spending limit of the new run; default: that of the earlier one. */
  max_tokens?: number | null
  /** The same key gives the same run. */
  idempotency_key?: string | null
}

/** The run whose results were taken, and what is different from it. */
export interface RerunOf {
  run_id: string
  /** From which on everything ran again; null: only what had no result, or changed. */
  node: string | null
  /** The inputs that were given anew. */
  inputs: (string)[]
  /** Properties that were set for this run, as node.property. */
  set: Record<string, unknown>
}

export interface Retention {
  /** Media and files are deleted after so many days; null: COMFYFLEET_RETENTION_DAYS. */
  retention_days: number | null
}

export interface RetriedDispatch {
  job_id: string
}

export interface RetriedJobs {
  /** The jobs that are retried. */
  jobs: (string)[]
}

export interface Retry {
  /** Default: all failed jobs. */
  job_id?: string | null
}

export interface RetryBody {
  /** A higher spending limit for the whole run. */
  max_tokens?: number | null
  backend?: string | null
}

/** Where a result came from that was there already, and so was not run again. */
export interface ReusedFrom {
  /** null: it was no job that made it, but a person's answer. */
  job_id: string | null
  /** The graph run that made it, if one did. */
  run_id: string | null
}

export interface Revoked {
  worker_id: string
  /** SLUG/STAGE */
  fleet: string
  /** online, faulty, offline, draining, pending or revoked */
  state: string
  /** Why a faulty worker can't work. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Jobs that it holds now, at most `max_concurrency`: a further one waits there for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it was heard last, if it should have been heard since: it may be gone. */
  silent_since: string | null
  created_at: string
  /** How many jobs were requeued. */
  requeued: number
  /** What else may be needed to keep it out. */
  hint: string
}

export type Role = "viewer" | "operator" | "owner"

export interface RotateKey {
  /** The key it has is dead at once. Else it is told the new one with its next answer, and has both until it uses that. */
  now?: boolean
}

/** What the backend answered. `error`: why it did not, in a few words. */
export interface RouteAnswer {
  worker_id: string
  call_id: string
  status?: number
  headers?: Record<string, string>
  body?: string
  error?: string | null
}

/** A call to send to the backend once. `target`: its path and query. */
export interface RouteCall {
  id: string
  method: "GET" | "HEAD" | "POST" | "PUT" | "DELETE"
  target: string
  headers: Record<string, string>
  body: string
  answer_seconds: number
}

/** Asks for a call of a route below one of these prefixes. */
export interface RoutePoll {
  worker_id: string
  prefixes: (string)[]
  wait_seconds?: number
}

export interface RoutePolled {
  call: RouteCall | null
}

export interface RunBody {
  /** By input node. A file is named by its id, or by that of its media. */
  inputs?: Record<string, unknown>
  /** Default: the newest. */
  version?: number | null
  /** Spending limit: no job starts that could exceed it. */
  max_tokens?: number | null
  /** The same key gives the same run. */
  idempotency_key?: string | null
}

/** Two runs side by side. Files are compared by their content, where that is known. */
export interface RunComparison {
  a: ComparedRun
  b: ComparedRun
  values: (ComparedValue)[]
  /** How many values are the same. */
  same: number
  different: number
  /** Values that were too many to be listed. */
  left_out: number
}

/** Errors after which only a person can help. */
export type RunErrorCode = "no_tokens" | "no_backend" | "withdrawn"

/** A small picture of what a run has made so far; the newest replaces those before it. */
export interface RunPreview {
  node_id?: string | null
  content_type?: "image/jpeg" | "image/png" | "image/webp" | "image/gif"
  base64: string
  metadata?: Record<string, string | null>
}

/** Who waited for what in a run, and which executions its duration consists of. */
export interface RunTimeline {
  run_id: string
  name: string
  status: GraphRunStatus
  started_at: string
  /** To the end of the run, or until now. */
  seconds: number
  /** In the order of the graph. */
  nodes: (NodeTimeline)[]
  /** Each waited for the one before it; the longest, if there are many. */
  critical_path: (CriticalStep)[]
  /** How many steps the critical path has. */
  critical_total: number
}

export interface RunningNodeSeen {
  node_id: string
  index: (number)[]
  /** The backend that runs it, where backends are shown; otherwise the one that it is bound to. */
  backend_id: string | null
  /** 0 to 1. */
  progress: number
  current_step: string | null
}

/** When a schedule would fire next. */
export interface ScheduleMoments {
  moments: (string)[]
}

export type Scope = "read" | "write" | "keys"

/** The best few of each kind, the newest first. */
export interface SearchAnswer {
  media: (FoundMedia)[]
  effects: (FoundEffect)[]
  jobs: (FoundJob)[]
}

/** Who is signed in: a customer (`tenant`, `user`, `scopes`), an operator (`operator`, `role`), or one person as both. */
export interface SessionAnswer {
  signed_in: boolean
  /** `operator` for a person who is both; null: nobody is signed in. */
  kind: SessionKind | null
  kinds: (SessionKind)[]
  tenant: SessionTenant | null
  user: SessionUser | null
  scopes: (Scope)[]
  /** As the audit names the operator. */
  operator: string | null
  role: Role | null
  /** To be sent as `X-CSRF-Token` with every change. */
  csrf: string | null
  /** When somebody has to sign in again. */
  expires_at: string | null
  /** Whether `GET /api/catalogue` shows effects to anybody. */
  public_catalogue: boolean
  ways: SignInWays
}

export type SessionKind = "customer" | "operator"

export interface SessionTenant {
  id: string
  name: string
}

export interface SessionUser {
  id: string
  name: string | null
  email: string | null
}

export interface SettingAnswer {
  name: string
  /** The environment variable that sets it. */
  variable: string
  /** Secrets and passwords are masked. */
  value: string | number | boolean
  /** What it is. */
  remark: string
  is_default: boolean
}

export interface SettingsAnswer {
  version: string
  /** Whether ComfyUI's editor is installed: `/editor/`. */
  has_editor: boolean
  /** As they are in force; read only. */
  settings: (SettingAnswer)[]
}

/** A link that shows one result to whoever has it. */
export interface ShareAnswer {
  id: string
  job_id: string
  video_id: string | null
  /** Whether it also shows what went in, for before and after. */
  has_original: boolean
  created_at: string
  expires_at: string
  revoked_at: string | null
}

/** What a link shows. Nothing tells whose it is. */
export interface SharedAnswer {
  state: SharedState
  effect_title: string | null
  original: SharedFile | null
  outputs: (SharedFile)[]
  created_at: string
  expires_at: string
}

export interface SharedFile {
  filename: string
  content_type: string
  /** Valid until the link expires or is revoked. */
  url: string
}

export type SharedState = "ready" | "expired"

export interface Shares {
  /** The newest first, including revoked and expired ones. */
  shares: (ShareAnswer)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

export interface ShowBackends {
  /** Whether its users see machines; null: COMFYFLEET_SHOW_BACKENDS. */
  show_backends: boolean | null
}

/** One value that a node showed; `name` is the node's key for it, often `text`. */
export interface ShownValue {
  node_id: string
  name: string
  value?: unknown
}

/** By which ways somebody can sign in here. */
export interface SignInWays {
  /** `POST /api/session` with a key. */
  key: boolean
  /** `POST /api/session/local`: with the address that `comfyfleet up` has printed. */
  one_click: boolean
  /** `/auth/oidc/start`: with the operator's identity provider. */
  oidc: boolean
  /** What that provider is called. */
  oidc_name: string | null
}

/** What an execution did for a while, by the states of executions. */
export type SpanKind = "running" | "asking" | "queued" | "held" | "retried"

export type StageName = "checked" | "waiting" | "making" | "finishing"

export type StageState = "done" | "current" | "to_come"

export interface StartsWithin {
  /** How long jobs may wait for machines that start on demand; null: COMFYFLEET_NO_BACKEND_SECONDS. */
  seconds: number | null
}

export interface StepAnswer {
  name: string
  /** For the parents that exist now. */
  wanted: number
  made: number
  approved: number
  rejected: number
  in_flight: number
  failed: number
  needs_approval: boolean
  /** Candidates that a person is to judge; 0 where no approval is needed. */
  waiting: number
  judge: StepJudgeAnswer | null
  /** Of the jobs in flight, those of the judge. */
  judging: number
  /** Candidates that the judge has still to look at. */
  unjudged: number
}

/** The judge of a step, and from which score on it decides. */
export interface StepJudgeAnswer {
  /** Its measure, effect or workflow. */
  name: string
  /** From here on it approves; null: it approves nothing. */
  approve_above: number | null
  /** Below this it rejects; null: it rejects nothing. */
  reject_below: number | null
}

export interface StoppedWork {
  graph_runs: number
  pipeline_runs: number
  /** Triggers that were paused. */
  triggers: number
  /** Repeat the call for the rest. */
  has_more: boolean
}

export interface Storage {
  /** Including announced uploads. */
  used_bytes: number
  max_storage_bytes: number
  /** Objects that no row names, if they were asked for. A sweep deletes them after a day. */
  unnamed_objects: number | null
  /** False: only the first 100,000 objects were looked at. */
  is_complete: boolean
}

/** An input that can be exposed; as it is, it is a property for a new version. */
export interface SuggestedProperty {
  name: string
  type: "text" | "number" | "integer" | "boolean" | "choice" | "seed" | "image" | "video" | "audio"
  /** "<node id>.<input>" */
  binding: string
  node_id: string
  node_title: string
  /** Titles of the subgraphs around it, outermost first. */
  path: (string)[]
  input: string
  /** As saved. */
  value: unknown
  /** null for media and seeds. */
  default: unknown
  minimum: number | null
  maximum: number | null
  step: number | null
  choices: unknown[] | null
  is_multiline: boolean
  /** file, text, seed, size, steps or model, if it matters. */
  role: string | null
}

export interface SwitchAnswer {
  /** A checkpoint or diffusion model. */
  model: string
  /** What a switch to it costs, at most. */
  seconds: number
  /** How long its runs take without a switch. */
  run_seconds: number
  /** As many of each kind were compared. */
  runs: number
  /** Whether a switch costs so little that the order of arrival is kept. */
  is_free: boolean
}

/** The media that an effect is applied to. */
export interface Takes {
  /** image, video or audio */
  kind: string
  /** Empty: all types of the kind. */
  media_types: (string)[]
  max_bytes: number
}

export interface TenantAnswer {
  id: string
  name: string
  pool: string
  min_priority: number
  max_priority: number
  /** null: COMFYFLEET_MAX_QUEUED_PER_TENANT. */
  max_queued: number | null
  /** null: COMFYFLEET_RETENTION_DAYS. */
  retention_days: number | null
  /** null: COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT. */
  max_storage_bytes: number | null
  /** null: COMFYFLEET_SHOW_BACKENDS. */
  show_backends: boolean | null
  /** When deleting its private data started. */
  erasing_at: string | null
  /** When only its ledger was left. */
  erased_at: string | null
  created_at: string
}

/** What a tenant's prompts may use, of what the fleets allow. */
export interface TenantPrompts {
  /** As SLUG/STAGE; null: all fleets that take prompts. */
  fleets: (string)[] | null
  /** Node types that its prompts may use on any of its fleets. */
  allow: (string)[]
  /** Node types that they may not use. */
  deny: (string)[]
}

/** Open graph runs and pipeline runs, and all triggers; of each kind the newest 200. */
export interface TenantWork {
  items: (WorkItemAnswer)[]
}

export interface Tenants {
  tenants: (TenantAnswer)[]
}

/** The terms of a workflow; fields that are left out stay as they are. */
export interface TermsBody {
  /** A worker must have all of them to get a job. */
  required_capabilities?: (string)[] | null
  /** How long a job may run; else COMFYFLEET_RUN_LIMIT_SECONDS. */
  run_limit_seconds?: number | null
  /** Offers it in customers' graphs and pipelines, at this price; 0: for nothing. */
  price_tokens?: number | null
  /** True: it is no longer offered; runs that go on may use it. */
  is_withdrawn?: boolean
  /** Whether a result needs a file or a value; default: required, or optional for a new workflow whose output nodes only show text. */
  output?: "required" | "optional" | null
  /** How delivered files are marked as made by AI: auto (default) decides by the prompt; generated and edited always mark; none never does. */
  ai_mark?: "auto" | "generated" | "edited" | "none" | null
}

export interface TimelineSpan {
  kind: SpanKind
  /** Seconds since the run was started. */
  start: number
  end: number
}

/** One entry of the ledger. */
export interface TransactionAnswer {
  id: number
  type: TransactionType
  /** What it added to the balance. */
  amount: number
  job_id: string | null
  /** Of a payment. */
  provider_transaction_id: string | null
  /** That its job applied. */
  effect_id: string | null
  /** The media of its job. */
  video_id: string | null
  created_at: string
}

export type TransactionType = "PAYMENT_CREDIT" | "JOB_RESERVE" | "JOB_CONSUME" | "JOB_REFUND"

export interface Transactions {
  /** The newest first. */
  transactions: (TransactionAnswer)[]
  /** The next page: before=next; null: no more. */
  next: number | null
}

export interface TreeAnswer {
  tree: (Branch)[]
}

/** What starts runs of a graph or pipeline by itself. */
export interface TriggerAnswer {
  id: string
  name: string
  kind: TriggerKind
  graph_id: string | null
  /** null: the newest. */
  version: number | null
  pipeline_id: string | null
  /** Of a pipeline's runs. */
  base_candidates: number | null
  inputs: Record<string, unknown>
  cron: string | null
  timezone: string
  catch_up: boolean
  tokens_per_day: number
  /** Of one run. */
  max_tokens: number | null
  /** Today, in its time zone; open runs count with all they may spend. */
  used_tokens: number
  is_paused: boolean
  /** The tokens of its day are used up; it starts nothing until the next. */
  is_spent: boolean
  /** Of a schedule that is not paused. */
  next_at: string | null
  /** Moments at which no control plane ran. */
  missed: number
  /** The newest of them. */
  missed_at: string | null
  /** Where webhooks are sent to. */
  path: string | null
  created_at: string
}

export type TriggerKind = "schedule" | "webhook"

export interface Triggers {
  /** The newest first. */
  triggers: (TriggerAnswer)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

/** A numbered heartbeat whose answer was lost, so that the worker doesn't know whether it arrived. */
export interface UnheardReport {
  number: number
  events?: (unknown[])[]
}

export interface Upload {
  /** Link it with POST /api/videos after the upload. */
  file_id: string
  file: UploadedFile | null
  /** For the whole file at once. */
  upload: UploadSlot
  /** In place of it, if in_parts was sent: each by itself, in any order, several at once. */
  parts: (UploadPart)[]
  /** When the URLs expire. */
  expires_at: string
}

export interface UploadPart {
  /** From 1. */
  number: number
  /** Its first byte in the file. */
  start: number
  /** In bytes; its PUT takes exactly so many. */
  size: number
  /** null: it is there already. */
  upload: UploadSlot | null
}

export interface UploadSlot {
  method: string
  url: string
  /** Send these headers unchanged. */
  headers: Record<string, string>
}

/** What of an announced file has arrived. */
export interface UploadState {
  file_id: string
  /** As announced. */
  size: number
  received_bytes: number
  /** Nothing is missing: link it with POST /api/videos. */
  is_whole: boolean
  /** Of a file in parts, as long as some are missing. */
  parts: (UploadPart)[]
  /** When the URLs expire; repeat the call for new ones. */
  expires_at: string
}

/** A file as it was announced. */
export interface UploadedFile {
  id: string
  filename: string
  content_type: string
  size: number
}

export interface UserAnswer {
  id: string
  tenant_id: string
  email: string | null
  name: string | null
  is_active: boolean
  created_at: string
}

export interface Users {
  /** The oldest first. */
  users: (UserAnswer)[]
  /** The next page: after=next; null: no more. */
  next: string | null
}

export interface ValidationError {
  loc: (string | number)[]
  msg: string
  type: string
  input: unknown
  ctx: Record<string, unknown>
}

export interface Value {
  node_id: string
  /** The name that the node gives it. */
  name: string
  /** A text, number, boolean or JSON. */
  value: unknown
}

/** Whether a graph is valid, and all its problems. */
export interface Verdict {
  valid: boolean
  /** All of them, each with its node and port. */
  problems: (ProblemSeen)[]
  /** Nodes that no worker can run now. */
  warnings: (ProblemSeen)[]
  /** What was given as a text, as it was read. */
  document: Record<string, unknown> | null
  /** What a run would cost, of a graph without problems. */
  quote: QuoteAnswer | null
}

/** An uploaded picture, video or sound, with the state of its latest job. */
export interface Video {
  id: string
  kind: "image" | "video" | "audio"
  /** The status of its latest job. */
  status: MediaStatus
  /** Percent; null if unknown. */
  progress: number | null
  /** Why its latest job failed. */
  error: string | null
  /** Its latest job. */
  job_id: string | null
  /** Of its latest job. */
  effect_id: string | null
  /** Of the upload; null once it has expired. */
  filename: string | null
  /** Valid for 15 minutes; in a list only with urls=true. */
  original_file_url: string | null
  /** The latest job's result, if it has one; valid for 15 minutes, repeat the call for a new one. In a list only with urls=true. */
  processed_file_url: string | null
  /** A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small as it is. */
  original_small_url: string | null
  /** A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small as it is. */
  processed_small_url: string | null
  processed_content_type: string | null
  created_at: string
  expired_at: string | null
  /** From the effect's history, without the wait in the queue; null: unknown, also once a run takes longer than usual. */
  estimated_seconds_left: number | null
  /** All its jobs, also those under way; the newest first, 100 at most. */
  results: (MediaResult)[]
  /** What nodes showed: texts, numbers, booleans, JSON. */
  values: (Value)[]
  /** The texts of the first node that showed any; null: none did. */
  text: string | null
}

export interface VideoSummary {
  id: string
  kind: "image" | "video" | "audio"
  /** The status of its latest job. */
  status: MediaStatus
  /** Percent; null if unknown. */
  progress: number | null
  /** Why its latest job failed. */
  error: string | null
  /** Its latest job. */
  job_id: string | null
  /** Of its latest job. */
  effect_id: string | null
  /** Of the upload; null once it has expired. */
  filename: string | null
  /** Valid for 15 minutes; in a list only with urls=true. */
  original_file_url: string | null
  /** The latest job's result, if it has one; valid for 15 minutes, repeat the call for a new one. In a list only with urls=true. */
  processed_file_url: string | null
  /** A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small as it is. */
  original_small_url: string | null
  /** A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small as it is. */
  processed_small_url: string | null
  processed_content_type: string | null
  created_at: string
  expired_at: string | null
}

export interface Videos {
  /** The newest first. */
  videos: (VideoSummary)[]
  /** The next page: before=next; null: no more. */
  next: string | null
}

/** A vote, and the scores after it. */
export interface VoteAnswer {
  /** Use it to undo the vote. */
  id: string
  scores: Record<string, number>
}

export interface VoteBody {
  winner: string
  loser: string
  /** Both are equally good. */
  is_tie?: boolean
  /** A repeated call with the same id counts once. */
  id?: string | null
}

/** The balance of a wallet. */
export interface WalletAnswer {
  /** Tokens that are not reserved. */
  balance: number
}

/** The balance, what is held for jobs, and what came and went lately. */
export interface WalletSummaryAnswer {
  /** Tokens that are not reserved. */
  balance: number
  /** Held for jobs that have not ended. */
  reserved_tokens: number
  /** To which the sums below belong. */
  days: number
  added_tokens: number
  /** By jobs that completed. */
  spent_tokens: number
  /** By jobs that did not. */
  refunded_tokens: number
  /** Where tokens are bought, if the operator has named a place. */
  top_up_url: string | null
}

export interface WantedApproval {
  /** auto or manual, for workers that join from now on. */
  approval: "auto" | "manual"
}

export interface WantedKey {
  /** A name for people. */
  name: string
  /** Its scopes; default: those of the key that makes it. */
  scopes?: (Scope)[] | null
  /** null: never. */
  expires_at?: string | null
}

export interface WantedOutput {
  name: string
  content_type?: string
}

/** All terms: one that is left out is the default. */
export interface WantedPrompts {
  /** Whether it takes such prompts. */
  is_open?: boolean
  /** The price of each prompt, in tokens. */
  price_tokens?: number
  /** Instead of a fixed price: tokens for each second on the GPU. */
  price_per_second?: number | null
  /** Node types that may run although they are denied by default. */
  allow?: (string)[]
  /** Node types that may not run; stronger than any `allow`. */
  deny?: (string)[]
  /** Whether node types that are not ComfyUI's own may run, unless they take a path, a URL, code or a command. */
  allows_unknown?: boolean
  /** Most nodes of a prompt. */
  nodes_max?: number
  /** Most bytes of a prompt, as JSON. */
  prompt_bytes_max?: number
  /** A run that takes longer is stopped, and failed. */
  run_limit_seconds?: number
  /** Prefixes of routes that are passed on to a worker's backend, such as /api/etn. */
  passthrough?: (string)[]
  /** Whether a client's WebSocket shows its prompts one after another, in the order in which they started, as with a single ComfyUI. If false, it shows all messages at once. */
  in_order?: boolean
}

/** All of it: what is left out is the default. */
export interface WantedTenantPrompts {
  /** As SLUG/STAGE; null: all fleets that take prompts. */
  fleets?: (string)[] | null
  /** Node types that its prompts may use on any of its fleets. */
  allow?: (string)[]
  /** Node types that they may not use. */
  deny?: (string)[]
}

export interface WantedWorkflows {
  /** These and no others. */
  workflow_slugs: (string)[]
}

export interface WebhookAnswer {
  id: string
  url: string
  events: (WebhookEvent)[]
  /** false: switched off after days of failed deliveries; switch it on with …/activate. */
  is_active: boolean
  created_at: string
}

export type WebhookEvent = "job.completed" | "job.failed" | "job.cancelled" | "pipeline.alert" | "pipeline.paused" | "graph_run.ended" | "graph_run.failed" | "graph_run.asks"

/** How a receiver responded to a test message. */
export interface WebhookTest {
  /** Whether the response had a status from 200 to 299. */
  is_delivered: boolean
  /** Of the response; null: there was none. */
  status: number | null
  /** Why there was no response. */
  error: string | null
}

export interface Webhooks {
  webhooks: (WebhookAnswer)[]
}

export interface WhyDispatch {
  why: string
}

/** A run or trigger of a tenant, as operators see it. */
export interface WorkItemAnswer {
  kind: WorkKind
  id: string
  user_id: string
  status: string
  created_at: string
}

export type WorkKind = "graph_run" | "pipeline_run" | "trigger"

export interface WorkScope {
  /** Only this user's; default: all. */
  user_id?: string | null
}

export interface WorkerAnswer {
  worker_id: string
  /** SLUG/STAGE */
  fleet: string
  /** online, faulty, offline, draining, pending or revoked */
  state: string
  /** Why a faulty worker can't work. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Jobs that it holds now, at most `max_concurrency`: a further one waits there for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it was heard last, if it should have been heard since: it may be gone. */
  silent_since: string | null
  created_at: string
}

export interface WorkerDetail {
  worker_id: string
  /** SLUG/STAGE */
  fleet: string
  /** online, faulty, offline, draining, pending or revoked */
  state: string
  /** Why a faulty worker can't work. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Jobs that it holds now, at most `max_concurrency`: a further one waits there for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it was heard last, if it should have been heard since: it may be gone. */
  silent_since: string | null
  created_at: string
  /** What it may run, by its fleet's assignments. */
  workflows: (string)[]
  /** The backend's version, node types and models. */
  backend: BackendFacts | null
  /** The last metrics of its machine. */
  reading: Reading | null
}

/** A job that a worker holds. */
export interface WorkerJob {
  job_id: string
  dispatch_id: number
  tenant_id: string
  workflow: string
  attempt: number
  /** null: it is prepared. */
  started_at: string | null
  percent: number | null
  /** The node that runs. */
  node: string | null
}

export interface WorkerSeen {
  worker_id: string
  /** SLUG/STAGE */
  fleet: string
  /** online, faulty, offline, draining, pending or revoked */
  state: string
  /** Why a faulty worker can't work. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Jobs that it holds now, at most `max_concurrency`: a further one waits there for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it was heard last, if it should have been heard since: it may be gone. */
  silent_since: string | null
  created_at: string
  /** Such as ComfyUI; null: not reported yet. */
  backend_kind: string | null
  backend_version: string | null
  gpu: string | null
  gpu_memory_bytes: number | null
  /** The last metrics of its machine. */
  reading: Reading | null
  /** When it told them. */
  read_at: string | null
  /** That it holds now. */
  jobs: (WorkerJob)[]
}

export interface Workers {
  workers: (WorkerSeen)[]
  /** The next page: after=next; null: no more. */
  next: string | null
}

export interface WorkflowAnswer {
  slug: string
  /** The version for new jobs. */
  version: number
  is_active: boolean
  is_paused: boolean
  required_capabilities: (string)[]
  run_limit_seconds: number
  /** Of a job in customers' graphs and pipelines; null: it is not offered there. */
  price_tokens: number | null
  /** SLUG/STAGE of those that it is assigned to. */
  fleets: (string)[]
  created_at: string
  /** Whether a job may complete without a file and a value. */
  output: "required" | "optional"
  /** How delivered files are marked as made by AI. */
  ai_mark: "auto" | "generated" | "edited" | "none"
}

export interface WorkflowDetail {
  slug: string
  /** The version for new jobs. */
  version: number
  is_active: boolean
  is_paused: boolean
  required_capabilities: (string)[]
  run_limit_seconds: number
  /** Of a job in customers' graphs and pipelines; null: it is not offered there. */
  price_tokens: number | null
  /** SLUG/STAGE of those that it is assigned to. */
  fleets: (string)[]
  created_at: string
  /** Whether a job may complete without a file and a value. */
  output: "required" | "optional"
  /** How delivered files are marked as made by AI. */
  ai_mark: "auto" | "generated" | "edited" | "none"
  /** workflow or prompt: what its document is. */
  kind: string
  document_hash: string
  output_node_id: string | null
  properties: (PropertyAnswer)[]
  node_types: (string)[]
  models: (Model)[]
  versions: (number)[]
  /** When, by version. */
  registered_at: Record<string, string>
}

export interface WorkflowDiff {
  nodes_added: (NamedNode)[]
  nodes_removed: (NamedNode)[]
  links_added: number
  links_removed: number
  /** At most 500. */
  values_changed: (ChangedValue)[]
  files_added: (string)[]
  files_removed: (string)[]
  properties_added: (string)[]
  properties_removed: (string)[]
  properties_changed: (string)[]
}

export interface WorkflowFigures {
  workflow: string
  completed: number
  failed: number
  cancelled: number
  mean_run_seconds: number | null
  /** 95 of 100 jobs waited less. */
  wait_p95_seconds: number | null
  run_p95_seconds: number | null
  /** How many completed or failed in each step; as long as `series.at`. */
  ended: (number)[]
  /** Now. */
  queued: number
  /** Now. */
  running: number
  /** Now: workers have them, and they have not begun. */
  held: number
}

export interface WorkflowInspection {
  /** json, png, webp, mp4 … */
  file_kind: string
  form: "workflow" | "prompt"
  /** To register it. */
  document: Record<string, unknown>
  drawing: Drawing
  /** Those that matter most first. */
  properties: (SuggestedProperty)[]
  outputs: (WorkflowOutput)[]
  node_types: (string)[]
  /** Models and other files that it names. */
  files: (string)[]
  /** What the fleet that knows most lacks; null: none has told what it has. */
  missing: MissingInFile | null
  notes: (string)[]
}

export interface WorkflowOffer {
  /** The field that names it. */
  kind: "effect" | "workflow"
  name: string
  /** The one that a node gets if it names none. */
  version: number
  price_tokens: number
  /** null: not measured yet. */
  typical_seconds: number | null
  properties: (OfferedProperty)[]
}

export interface WorkflowOffers {
  /** Effects first, by name. */
  workflows: (WorkflowOffer)[]
}

export interface WorkflowOutput {
  node_id: string
  title: string
  media: string
  is_saved: boolean
}

export interface Workflows {
  workflows: (WorkflowAnswer)[]
}
