// Made by `make docs` from the control plane's OpenAPI document: change it there.

export interface AbleWorker {
  worker_id: string
  fleet: string
  can_run: boolean
  /** node_types, models and capabilities. */
  missing: Record<string, (string)[]>
}

export interface AbleWorkers {
  /** Workers that have reported their backends' contents. */
  workers: (AbleWorker)[]
}

/** The owner of the key, its permissions, and the account's limits and balance. */
export interface AccountAnswer {
  user: AccountUser
  tenant: AccountTenant
  key: KeyAnswer
  limits: AccountLimits
  /** Tokens that are not reserved. */
  balance: number
  /** Where to buy tokens, if the operator has configured it. */
  top_up_url: string | null
}

/** The user's limits and their current usage. */
export interface AccountLimits {
  /** Maximum number of queued and running jobs of all kinds. */
  max_active_jobs: number
  active_jobs: number
  max_upload_bytes: number
  /** Limit for the whole tenant, including announced uploads. */
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
  /** The first characters of the key. */
  prefix: string
  scopes: (Scope)[]
  created_at: string
  expires_at: string | null
  revoked_at: string | null
  last_used_at: string | null
}

export interface AdminKeys {
  /** Newest first, including revoked ones. */
  keys: (AdminKeyAnswer)[]
}

export interface AdminMadeKey {
  id: string
  user_id: string
  name: string
  /** The first characters of the key. */
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
  /** The change of the balance. */
  amount: number
  job_id: string | null
  provider_transaction_id: string | null
  created_at: string
}

export interface AdminTransactions {
  /** Newest first. */
  transactions: (AdminTransactionAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
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
  /** Sorted by user. */
  wallets: (AdminWalletAnswer)[]
  /** Pass this as `after` to get the next page. null on the last page. */
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

/** A job's settings, ready to be changed and submitted again. */
export interface AgainAnswer {
  effect_id: string | null
  effect_slug: string | null
  /** null if the job had no media, or it has expired. */
  video_id: string | null
  /** Properties for a new job. Files are represented by the ids of their media. */
  properties: Record<string, unknown>
  /** The current price. */
  price_tokens: number | null
  /** Settings that can't be reused, as messages for users. Empty if all can. */
  problems: (string)[]
}

export interface Alert {
  kind: AlertKind
  severity: "warning" | "error"
  /** The problem, as one sentence. */
  message: string
  /** What to do about it. */
  todo: string
  /** For example, workflow:upscale or worker:gpu-7. */
  subject: string | null
  /** Number of affected jobs or workers. */
  count: number
}

export type AlertKind = "error_rate" | "workers_lost" | "workers_pending" | "stuck_jobs" | "poisoned_jobs" | "disk" | "maintenance" | "pool_down"

export interface Alerts {
  /** Most severe first. */
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

/** A file that the worker uploads to its backend. The resulting name is written to `binding`. */
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
  /** Checks that were not possible. */
  warnings: (string)[]
}

export interface Attempt {
  at: string
  actor: string
  action: string
  details: Record<string, unknown>
}

/** A lease in the timeline of a job. */
export interface AttemptLine {
  attempt: number
  lease_number: number
  worker_id: string | null
  /** When the job started to wait for this lease. */
  queued_at: string | null
  leased_at: string
  /** When the prompt was sent to the backend. */
  started_at: string | null
  ended_at: string | null
  /** completed, failed, requeued, expired or cancelled. null if the lease is active. */
  outcome: string | null
  message: string | null
  /** The submitted prompt. null if it was not reported, or was deleted. */
  prompt: Record<string, unknown> | null
}

export interface AttemptSeen {
  attempt: number
  lease_number: number
  worker_id: string
  started_at: string
  /** null if it was deleted after the retention time. */
  prompt: Record<string, unknown> | null
}

export interface Attempts {
  /** The prompt that workers receive. null if it was deleted. */
  prompt: Record<string, unknown> | null
  /** The submitted prompts, in the order of leases. */
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

/** A worker's backend, or a whole fleet if individual machines aren't shown. */
export interface BackendSeen {
  /** The value for `backend_affinity` of a graph's node. */
  name: string
  /** SLUG/STAGE */
  fleet: string
  /** Whether it accepts jobs now. */
  is_online: boolean
  /** Jobs that are running on it, and queued jobs that only it may run. */
  queue_depth: number
  /** The GPU's name; only for machines. */
  device: string | null
  /** Memory of the GPU; for a fleet, of its largest GPU. null if unknown. */
  memory_total_bytes: number | null
  memory_free_bytes: number | null
}

/** The `system` object of a ComfyUI's `/system_stats`, without values that change while it runs. The names are ComfyUI's. */
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
  /** false if the list is limited to the first 500 backends. */
  is_whole: boolean
}

export interface Balance {
  balance: number
}

/** A batch with its costs and the number of its jobs by status. */
export interface BatchAnswer {
  id: string
  effect_id: string
  total: number
  /** Jobs that are not in the queue yet. Only 5 of a batch are queued at a time. */
  held: number
  /** Number of jobs by status. */
  counts: Record<string, number>
  /** Percentage of the jobs that have ended. */
  progress: number
  is_ended: boolean
  /** Tokens of jobs that have not ended. */
  reserved_tokens: number
  consumed_tokens: number
  refunded_tokens: number
  created_at: string
  cancelled_at: string | null
  /** A page of its jobs, in the order of the items. */
  jobs: (JobSummary)[]
  /** Pass this as `start` to get the next page. null on the last page. */
  next: number | null
}

export interface Books {
  /** Whether everything was verified without finding a discrepancy. */
  is_sound: boolean
  /** Number of discrepancies. */
  found: number
  /** The first 1,000 discrepancies. */
  drifts: (DriftAnswer)[]
  /** Pools that are down. Their ledgers were not verified. */
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
  /** Number of jobs that this call selected. */
  matched: number
  /** Number of jobs that were changed. */
  done: number
  /** The jobs that were not changed, with the reasons. */
  failed: (BulkFailureAnswer)[]
  /** For a retry, the new job of each old one. */
  retries: Record<string, string>
  /** Set if more jobs match the filter. Repeat the call with this as `after`. */
  next: string | null
  /** Pools that are down. Their jobs are not changed. */
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

/** A bulk action on jobs, selected by their ids or by a filter. */
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

/** A candidate that a step of a pipeline created. */
export interface CandidateAnswer {
  id: string
  /** The step's number. 0 is the base. */
  step: number
  parent: string | null
  status: CandidateStatus
  /** Who decided the status. null if it hasn't been judged yet. */
  judged_by: JudgedBy | null
  /** Its rating by votes. */
  score: number
  /** The score of its step's judge. null if there is none. */
  judge_score: number | null
  /** Why the judge gave no score, so that a person must judge it. */
  judge_error: string | null
  child_count: number
  seed: number | null
  /** The seed as a string, because seeds are too large for JavaScript's numbers. */
  seed_text: string | null
  /** The properties that were used to create it. */
  properties: Record<string, unknown>
  job_id: string | null
  /** The backend's id of the run, which is ComfyUI's `prompt_id`. */
  provider_job_id: string | null
  output_index: number
  /** Its name in listings and exports. */
  path: string
  content_type: string
  size: number
  /** Valid for 15 minutes. null for a text, and after the file was deleted. */
  url: string | null
  /** A thumbnail of at most 512 pixels, with the same validity as the other URL. null if the file is not an image, or already small. */
  small_url: string | null
  /** The text that its job showed, together with or instead of an image. */
  text: string | null
  created_at: string
}

export interface CandidatePage {
  /** Oldest first, unless `sort` specifies a different order. */
  candidates: (CandidateAnswer)[]
  /** Pass this as `after` to get the next page. null on the last page. */
  next: string | null
}

/** The order of a list of candidates. */
export type CandidateSort = "oldest" | "best" | "score"

/** The judgment of a candidate. */
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

/** The possible answers to a question. */
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
  /** Whether its inputs, outputs and records have been deleted. */
  is_expired: boolean
}

export interface ComparedValue {
  section: CompareSection
  name: string
  /** As text, truncated if it is long. null if the run has no such value. */
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

/** The response to complete. `next` is the response to its `poll`. Without it, the worker has to poll. `polls_on` means that a poll of this worker is already waiting, and no longer counts the lease that has ended. If false, a poll that waits to prefetch continues until the worker polls again. */
export interface Completed {
  ok: boolean
  next: Polled | null
  polls_on: boolean
}

/** An execution on the critical path, from the end of the previous step to its own end. */
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
  /** Newest first. */
  deliveries: (DeliveryAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

/** A delivery of an event to a webhook, with its attempts. */
export interface DeliveryAnswer {
  id: string
  job_id: string
  event: WebhookEvent
  status: DeliveryStatus
  tries: number
  /** The status of the receiver's last response. */
  last_status: number | null
  /** Why there was no response. */
  last_error: string | null
  /** null if the delivery has ended. */
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
  /** For older ones, repeat the call with this as `before`. */
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

/** The response to complete, fail, requeue and deregister. A repeated call gets the same response. */
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
  /** Empty if unknown. */
  type: string
}

export interface DriftAnswer {
  fault: Fault
  tenant_id: string
  user_id: string | null
  job_id: string | null
  message: string
}

/** An effect in the customers' view. `properties` is a JSON Schema of a job's properties. */
export interface EffectAnswer {
  /** Use this as `effect_id` of a job. */
  id: string
  slug: string
  title: string
  description: string
  preview_url: string | null
  /** Reserved at submission, and charged on success. */
  price_tokens: number
  /** The median of the latest runs. null before the first run. */
  typical_seconds: number | null
  /** The duration of the latest run. null before the first run. */
  last_processing_time_seconds: number | null
  /** null if it needs no media, and therefore no `video_id`. */
  takes: Takes | null
  /** JSON Schema (2020-12) of the properties that a job may send, in the order of a form. `x-kind` of each property specifies its form field: text, multiline, number, integer, boolean, choice, seed, colour, image, mask, video or audio. */
  properties: Record<string, unknown>
  tags: (string)[]
  /** The first one is the main example. */
  examples: (Example)[]
  /** Whether the balance of the key's user covers the price. */
  can_pay: boolean
}

export interface Entries {
  /** Newest first. */
  entries: (EntryAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
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
  /** The backend that runs it, if backends are shown. Otherwise, the backend that it is bound to. */
  backend: string | null
  message: string
  /** Alternative backends, for a node that is bound to a backend. */
  alternatives: (string)[]
  /** Code of an error that a retry can't resolve. null for all other errors. */
  code: RunErrorCode | null
  /** What a person must do before a new run can succeed. null if this is unknown. */
  action: string | null
}

/** An example of an effect: the original and the result. */
export interface Example {
  before: ExampleMedia | null
  after: ExampleMedia | null
}

export interface ExampleMedia {
  /** Served by the control plane without a key. It never changes, so it can be cached. */
  url: string
  content_type: string
  /** In bytes. */
  size: number
  /** Of an image, in pixels. */
  width: number | null
  height: number | null
}

export interface ExecutionSeen {
  node: string
  index: (number)[]
  status: ExecutionStatus
  attempts: number
  /** The job of its last attempt. */
  job_id: string | null
  /** Why it is waiting, if no worker can run it now. */
  why: string | null
  /** The backend that runs it, if backends are shown. Otherwise, the backend that it is bound to. */
  backend: string | null
  progress: number
  current_step: string | null
  inputs: Record<string, unknown> | null
  outputs: Record<string, unknown> | null
  /** false if inputs and outputs were omitted because the response would be too large. */
  has_values: boolean
  error: string | null
  /** Traceback of a failed node, if backends are shown. */
  traceback: string | null
  notes: (string)[]
  /** Set if an existing result was reused. In this case, it has no job and cost nothing. */
  reused_from: ReusedFrom | null
  queued_at: string | null
  started_at: string | null
  ended_at: string | null
}

export type ExecutionStatus = "pending" | "held" | "queued" | "running" | "moving" | "asking" | "stopping" | "done" | "skipped" | "failed" | "cancelled"

/** The settings of an effect. Omitted fields aren't changed; in a new effect, they get their default. */
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

/** The backend's contents, if they have changed. */
export interface FactsReport {
  worker_id: string
  tokens: (string)[]
  backend?: BackendFacts | null
}

export interface FactsReported {
  object_info_upload: OutputSlot | null
}

/** A request to read the backend's node types and models, and to report them via /facts. The report contains the tokens of all requests that arrived before the reading started. An urgent request follows a call that may have changed the backend. */
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
  /** Whether it was a job to judge `parent`, which a person must judge now. */
  is_judge: boolean
  error: string | null
  ended_at: string | null
}

export interface Failures {
  /** Newest first. */
  failures: (FailureAnswer)[]
}

export type Fault = "balance" | "negative" | "no_wallet" | "settled_twice" | "not_reserved" | "amount" | "not_settled" | "settled_early" | "settled_wrongly"

export interface FileSeen {
  /** The name of the property or output. */
  name: string
  filename: string
  /** null if it was not requested, or if the file no longer exists. */
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

/** A firing of a trigger, with its run or the reason why it started no run. */
export interface FiringAnswer {
  id: string
  trigger_id: string
  cause: FiringCause
  status: FiringStatus
  /** For a schedule. */
  planned_at: string | null
  run_id: string | null
  /** The status of the run. */
  run_status: string | null
  /** Maximum tokens of the run. */
  max_tokens: number
  error_code: string | null
  error: string | null
  /** Number of missed times. */
  missed: number
  created_at: string
  ended_at: string | null
}

export type FiringCause = "schedule" | "catch_up" | "webhook" | "hand"

export type FiringStatus = "starting" | "started" | "refused" | "missed"

export interface Firings {
  /** Newest first. */
  firings: (FiringAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

export interface FleetAnswer {
  slug: string
  stage: string
  max_workers: number | null
  approval: string
  /** How long its machines take to start on demand. */
  starts_within_seconds: number | null
  /** Number of workers that have joined. */
  workers: number
  /** Slugs of the workflows assigned to it. */
  workflows: (string)[]
  /** Hash of the object_info that its backends last reported. */
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
  /** Number of workers that have joined. */
  workers: number
  /** Slugs of the workflows assigned to it. */
  workflows: (string)[]
  /** Hash of the object_info that its backends last reported. */
  object_info_hash: string | null
  created_at: string
  /** The commands for joining a worker, without the secret. */
  join: string
  /** Learned from finished runs. */
  model_switches: (SwitchAnswer)[]
}

/** The conditions, with a warning for the operator. */
export interface FleetPromptsAnswer {
  /** Whether it accepts such prompts. */
  is_open: boolean
  /** The price of each prompt in tokens. */
  price_tokens: number
  /** Tokens per second on the GPU, instead of a fixed price. */
  price_per_second: number | null
  /** Node types that may run although they are denied by default. */
  allow: (string)[]
  /** Node types that may not run. Overrides every `allow`. */
  deny: (string)[]
  /** Whether node types that are not ComfyUI's own may run. Node types with a path, a URL, code or a command as input are not included. */
  allows_unknown: boolean
  /** Maximum number of nodes in a prompt. */
  nodes_max: number
  /** Maximum size of a prompt as JSON, in bytes. */
  prompt_bytes_max: number
  /** A run that takes longer is stopped and fails. */
  run_limit_seconds: number
  /** Prefixes of routes that are forwarded to a worker's backend, such as /api/etn. */
  passthrough: (string)[]
  /** Whether a client's WebSocket shows its prompts one after another, in the order in which they started, as with a single ComfyUI. If false, the messages of all prompts are shown as they arrive. */
  in_order: boolean
  /** Set if prompts cost less than a registered workflow that the fleet runs. */
  warning: string | null
}

export interface FleetSecret {
  slug: string
  stage: string
  /** Workers use it to join. It is shown only once. */
  secret: string
  /** The commands for joining a worker next to its ComfyUI, including the secret. */
  join: string
}

export interface Fleets {
  fleets: (FleetAnswer)[]
}

/** A job with the information for a page that waits for it. */
export interface FollowedJob {
  id: string
  status: JobStatus
  effect_id: string | null
  effect_slug: string | null
  effect_title: string | null
  video_id: string | null
  /** null if it has ended. */
  stage: StageName | null
  /** Always the same four stages, in order. */
  stages: (JobStage)[]
  /** The position in the queue, described in words, while the job is waiting. */
  why: string | null
  /** In percent, as measured by its worker. null until the first report. */
  progress: number | null
  /** Estimated progress in percent, based on the effect's history, until the first report. null if unknown. */
  expected_progress: number | null
  /** Estimated from the effect's history, without the time in the queue. null if unknown, or if the run takes longer than usual. */
  seconds_left: number | null
  /** The node that is running now. */
  node: string | null
  node_title: string | null
  /** The step of the node that is running now. */
  step: number | null
  steps: number | null
  /** Why it failed, as a message for users. */
  error: string | null
  price_tokens: number
  /** Refunded tokens, if it did not succeed. */
  refunded_tokens: number
  submitted_at: string
  started_at: string | null
  completed_at: string | null
}

export interface FollowedJobs {
  /** Newest first. */
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
  /** null if the file has expired. */
  filename: string | null
  created_at: string
}

export interface FoundThing {
  kind: FoundKind
  /** The id or slug for its page. */
  id: string
  name: string
  /** Its status, fleet or pool. */
  detail: string
}

export interface FoundThings {
  found: (FoundThing)[]
  /** Pools that are down. Their jobs are not found. */
  pools_left_out: (string)[]
}

export interface GoOn {
  /** `next` of an earlier response. */
  after?: string | null
}

/** A stored graph with its document and version. */
export interface GraphAnswer {
  id: string
  name: string
  version: number
  document: Record<string, unknown>
  /** The graph as a Mermaid diagram. */
  mermaid: string
}

export interface GraphPage {
  /** Newest first. */
  graphs: (GraphSummary)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

export interface GraphPort {
  name: string
  /** For example `image`, `text[]`, `result` or `any`. */
  type: string
  /** Only for inputs. */
  required: boolean
}

/** The inputs and outputs of a graph, which are ports when the graph is used as a node. */
export interface GraphPorts {
  inputs: (GraphPort)[]
  outputs: (GraphPort)[]
}

/** A graph run with its status, nodes and results. */
export interface GraphRunAnswer {
  id: string
  graph_id: string
  graph_version: number
  name: string
  status: GraphRunStatus
  /** Tokens of jobs that are in flight or done. */
  tokens: number
  max_tokens: number | null
  inputs: Record<string, unknown>
  /** By output node. Files have new URLs. */
  outputs: Record<string, unknown> | null
  error: ErrorSeen | null
  /** Since when it is paused. It starts no jobs until it is resumed. null if it isn't paused. */
  paused_at: string | null
  questions: (QuestionSeen)[]
  progress: ProgressSeen
  nodes: (NodeSeen)[]
  executions: (ExecutionSeen)[]
  executions_total: number
  /** The graph that was run, if requested. */
  document: Record<string, unknown> | null
  created_at: string
  ended_at: string | null
  /** Whether its retention period is over, so that inputs, outputs and records were deleted. */
  is_expired: boolean
  /** The run whose results it reused, if it is a rerun. */
  rerun_of: RerunOf | null
}

export type GraphRunStatus = "pending" | "running" | "waiting_for_user" | "completed" | "failed" | "cancelled"

export interface GraphRunSummaries {
  /** Newest first. */
  runs: (GraphRunSummary)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

export interface GraphRunSummary {
  id: string
  graph_id: string
  graph_version: number
  /** The current name of its graph. */
  name: string
  status: GraphRunStatus
  /** Tokens of jobs that are in flight or done. */
  tokens: number
  max_tokens: number | null
  /** Why it failed, as a message for users. */
  error: string | null
  created_at: string
  ended_at: string | null
  /** The run whose results it reused. */
  rerun_of: string | null
  /** Since when it is paused. It starts no jobs until it is resumed. null if it isn't paused. */
  paused_at: string | null
}

export interface GraphSummary {
  id: string
  /** Its creator. Only this user can change it. */
  user_id: string
  name: string
  /** The newest version. */
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

/** A lease, with all data that is needed to run the job. */
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

/** The actions that are currently available for the job. */
export interface JobActs {
  cancel: boolean
  retry: boolean
  reprioritise: boolean
  replay: boolean
}

/** A job with its status, its outputs, and the values that its nodes showed. */
export interface JobAnswer {
  id: string
  status: JobStatus
  effect_id: string | null
  video_id: string | null
  batch_id: string | null
  retry_of: string | null
  /** The job whose result was reused free of charge instead of running this job. */
  reused_from: string | null
  /** Reserved at submission. Consumed on success, otherwise refunded. */
  price_tokens: number
  /** In percent. null if unknown. */
  progress: number | null
  /** Why it failed, as a message for users. */
  error: string | null
  submitted_at: string
  started_at: string | null
  /** When it ended, regardless of the result. */
  completed_at: string | null
  idempotency_key: string | null
  /** Including default values, such as a random seed. */
  properties: Record<string, unknown>
  /** Estimated from the effect's history, without the time in the queue. null if unknown, or if the run takes longer than usual. */
  estimated_seconds_left: number | null
  outputs: (Output)[]
  /** The input of a job that has ended, as long as it is stored. */
  original: Output | null
  /** URL of the first output. */
  processed_file_url: string | null
  /** Values that nodes showed: texts, numbers, booleans and JSON. */
  values: (Value)[]
  /** The texts of the first node that showed any. null if no node did. */
  text: string | null
  /** At submission: a warning that the job will wait, because no worker can run it now. */
  warnings: (string)[]
}

export interface JobCountsAnswer {
  /** Number of jobs by status. */
  counts: Record<string, number>
  /** A count of this value means this number or more. */
  counted_max: number
  /** Pools that are down. Their jobs are not counted. */
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
  /** The id that the submitting ComfyUI client uses for the job. */
  prompt_id: string | null
  /** The backend's id of the completed run, which is ComfyUI's `prompt_id`. */
  provider_job_id: string | null
  progress: Progress | null
  values: (ShownValue)[]
  submitted_at: string
  started_at: string | null
  completed_at: string | null
  dispatch: DispatchSeen | null
  /** Why it isn't running. */
  why: string | null
  /** Seconds after which only a person can help. null if the job needs no help. */
  person_needed_after: number | null
  /** What that person must do. null if the job needs no help. */
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
  /** The job whose result it reused instead of running. */
  reused_from: string | null
  media_id: string | null
  batch_id: string | null
  /** `graph` or `pipeline`, if it is part of a run. */
  run_kind: string | null
  run_id: string | null
  /** Whether it waits outside the queue for other jobs of its user. */
  is_held: boolean
  /** The prompt that workers receive. null if it was deleted. */
  prompt: Record<string, unknown> | null
  output_node_id: string | null
  inputs: (FileSeen)[]
  outputs: (FileSeen)[]
  /** In the order of leases. */
  attempts: (AttemptLine)[]
  /** Oldest first. */
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
  /** The worker that has the job, or had it last. */
  worker_id: string | null
  /** Progress of a running job, if its backend reports it. */
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
  /** Newest first. */
  jobs: (JobListed)[]
  /** Pass this as `after` to get the next page. null on the last page. */
  next: string | null
  /** Pools that are down. Their jobs are not listed. */
  pools_left_out: (string)[]
}

export interface JobPreview {
  /** An image as a data: URL. null if there is none, or if the job isn't running. */
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
  /** The id that the submitting ComfyUI client uses for the job. */
  prompt_id: string | null
  /** The backend's id of the completed run, which is ComfyUI's `prompt_id`. */
  provider_job_id: string | null
  progress: Progress | null
  values: (ShownValue)[]
  submitted_at: string
  started_at: string | null
  completed_at: string | null
  dispatch: DispatchSeen | null
  /** Why it isn't running. */
  why: string | null
  /** Seconds after which only a person can help. null if the job needs no help. */
  person_needed_after: number | null
  /** What that person must do. null if the job needs no help. */
  required_action: string | null
  outputs: (OutputSeen)[]
}

/** A stage of a job. Every job has the same four stages. */
export interface JobStage {
  name: StageName
  state: StageState
  /** How long it took in seconds. Until it is done, how long it usually takes. null if unknown. */
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
  /** The job whose result was reused free of charge instead of running this job. */
  reused_from: string | null
  /** Reserved at submission. Consumed on success, otherwise refunded. */
  price_tokens: number
  /** In percent. null if unknown. */
  progress: number | null
  /** Why it failed, as a message for users. */
  error: string | null
  submitted_at: string
  started_at: string | null
  /** When it ended, regardless of the result. */
  completed_at: string | null
}

export interface JobWaitAnswer {
  /** The reason why the job isn't running, as one sentence. */
  why: string
  /** Seconds after which only a person can help, because no worker can run the job. null if the job needs no help. */
  person_needed_after: number | null
  /** What that person must do. null if the job needs no help. */
  required_action: string | null
}

export interface Jobs {
  /** Newest first. */
  jobs: (JobSummary)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

/** The kind of judge that decided a candidate's status. */
export type JudgedBy = "judge" | "person"

export interface KeyAnswer {
  id: string
  name: string
  /** The first characters of the key. */
  prefix: string
  scopes: (Scope)[]
  created_at: string
  expires_at: string | null
  revoked_at: string | null
  /** Accurate to the minute. */
  last_used_at: string | null
}

export interface KeySignIn {
  /** Of a user (`cf_…`) or an operator (`cfo_…`), or the admin key. */
  key: string
}

/** Seconds by kind, summed over all executions of a node. */
export interface KindSeconds {
  running: number
  asking: number
  queued: number
  held: number
  retried: number
}

/** The items that a backend reported as missing when it refused a prompt. */
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

/** Limits of a run. Omitted fields aren't changed; null means no limit. */
export interface LimitsBody {
  candidates?: number | null
  tokens?: number | null
  concurrent_jobs?: number
  until?: string | null
  /** Maximum size of its files; then it is paused. */
  bytes?: number | null
}

/** A candidate's origin and its votes. */
export interface LineageAnswer {
  /** The candidate itself, then its parent, and so on. The base is last. */
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
  /** The first characters of the key. */
  prefix: string
  scopes: (Scope)[]
  created_at: string
  expires_at: string | null
  revoked_at: string | null
  /** Accurate to the minute. */
  last_used_at: string | null
  /** Shown only once, because only its hash is stored. */
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

/** A newly created link, with its secret. */
export interface MadeShare {
  id: string
  job_id: string
  video_id: string | null
  /** Whether it also shows the original, for a before/after comparison. */
  has_original: boolean
  created_at: string
  expires_at: string
  revoked_at: string | null
  /** Shown only once, because only its hash is stored. */
  secret: string
  /** The page that shows the result. GET /api/shared/SECRET returns the same information as data. */
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
  /** null means the newest version. */
  version: number | null
  pipeline_id: string | null
  /** For runs of a pipeline. */
  base_candidates: number | null
  inputs: Record<string, unknown>
  cron: string | null
  timezone: string
  catch_up: boolean
  tokens_per_day: number
  /** Maximum tokens of one run. */
  max_tokens: number | null
  /** Tokens used today in its time zone. Open runs count with their maximum. */
  used_tokens: number
  is_paused: boolean
  /** Whether its daily tokens are used up. If so, it starts no runs until the next day. */
  is_spent: boolean
  /** For a schedule that is not paused. */
  next_at: string | null
  /** Number of scheduled times at which no control plane was running. */
  missed: number
  /** The newest missed time. */
  missed_at: string | null
  /** The path for incoming webhooks. */
  path: string | null
  created_at: string
  /** The secret of a webhook. Shown only once. */
  secret: string | null
}

export interface MadeWebhook {
  id: string
  url: string
  events: (WebhookEvent)[]
  /** false if it was disabled after days of failed deliveries. Use …/activate to enable it. */
  is_active: boolean
  created_at: string
  /** Shown only here and by …/secret. Every delivery is signed with it (HMAC-SHA256). */
  secret: string
}

export interface Maintenance {
  on: boolean
}

export interface Matrix {
  workflows: (MatrixWorkflow)[]
  workers: (MatrixWorker)[]
  /** false if there are more workers or workflows than listed. */
  is_whole: boolean
}

export interface MatrixWorker {
  worker_id: string
  fleet: string
  state: string
  /** Slugs of workflows. */
  can_run: (string)[]
  /** The node_types, models and capabilities that it lacks, by workflow. */
  missing: Record<string, Record<string, (string)[]>>
  /** Workflows for which this is unknown, because the worker hasn't reported its backend's contents. */
  unknown: (string)[]
}

export interface MatrixWorkflow {
  workflow: string
  /** The fleets that it is assigned to, as SLUG/STAGE. */
  fleets: (string)[]
  /** Number of online workers that can run it. */
  able: number
  /** Number of online workers in its fleets. */
  online: number
}

/** A job that was run on a media item, with its first output. */
export interface MediaResult {
  job_id: string
  effect_id: string | null
  status: JobStatus
  /** The first output. Valid for 15 minutes. */
  url: string | null
  /** A thumbnail of at most 512 pixels, with the same validity as the other URL. null if the file is not an image, or already small. */
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
  /** Class.input. Empty if the node type is unknown. */
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

/** An uploaded file or a URL. Exactly one of them is required. */
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
  /** For a node that names a workflow. */
  workflow: string | null
  /** For a node that names an effect. */
  effect: string | null
  status: ExecutionStatus
  /** Number of executions, as far as it is known. */
  expected: number
  done: number
  skipped: number
  failed: number
  cancelled: number
}

/** The times at which a node waited, ran and ended. All its executions are in one row. */
export interface NodeTimeline {
  id: string
  type: string
  /** Its workflow or effect, if any. */
  name: string | null
  status: ExecutionStatus
  /** Number of executions that have started to wait or run. */
  executions: number
  expected: number
  /** The node that it is waiting for, or that it waited for longest. */
  after: string | null
  /** When all its inputs were decided for the first time. */
  ready: number | null
  /** When its last execution ended. */
  ended: number | null
  spans: (TimelineSpan)[]
  seconds: KindSeconds
  /** The index of the execution that took longest. */
  longest: (number)[] | null
  /** Whether it is on the critical path. */
  is_critical: boolean
}

/** A property that a node can set or connect. */
export interface OfferedProperty {
  name: string
  type: string
  /** null if no default is known. */
  default: unknown
  minimum: number | null
  maximum: number | null
  step: number | null
  choices: unknown[] | null
  /** Whether it must be set or connected. */
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

/** A file that a job created, with a download URL. */
export interface Output {
  name: string
  filename: string
  /** The file name for browsers, which combines the input's name and the effect. null means `filename`. */
  download_name: string | null
  content_type: string
  /** In bytes. */
  size: number | null
  /** Valid for 15 minutes. Repeat the call for a new one. */
  url: string
  /** A thumbnail of at most 512 pixels, with the same validity as the other URL. null if the file is not an image, or already small. */
  small_url: string | null
}

export interface OutputSeen {
  name: string
  /** The backend's name for the file. */
  filename: string
  url: string
  size: number | null
  content_type: string
}

/** The URL to which the worker uploads an output. */
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
  /** Busiest first. */
  workflows: (WorkflowFigures)[]
  /** Most severe first. */
  alerts: (Alert)[]
}

export interface OverviewNow {
  queued: number
  /** Jobs that have started on a worker. */
  running: number
  /** Jobs that workers have, but that have not started. */
  held: number
  /** How long the first job in the queue has waited. */
  oldest_seconds: number
  /** Number of jobs that the online workers can run at the same time. */
  slots: number
  /** Number of workers by state: idle, busy, draining, offline, revoked. */
  workers: Record<string, number>
  maintenance: boolean
  /** Number of queued jobs by fleet, as SLUG/STAGE. A job may count for several fleets. */
  waiting: Record<string, number>
}

/** Columns of equal length with one entry per step. null means that nothing is known about the step. */
export interface OverviewSeries {
  /** When each step begins. The last step isn't finished. */
  at: (string)[]
  /** Average number of waiting jobs. */
  queued: (number)[]
  /** Average number of jobs that workers held. */
  running: (number)[]
  completed: (number)[]
  failed: (number)[]
  cancelled: (number)[]
  /** Share of completed jobs among completed and failed ones. */
  success_rate: (number | null)[]
  wait_p50_seconds: (number | null)[]
  wait_p95_seconds: (number | null)[]
  run_p50_seconds: (number | null)[]
  run_p95_seconds: (number | null)[]
  /** Mean GPU load of all workers. */
  gpu_percent: (number | null)[]
  /** Usage of the workers' job slots in percent. */
  busy_percent: (number | null)[]
  /** Number of runs without a model switch before them. */
  stayed: (number)[]
  switched: (number)[]
  /** Tokens that completed jobs cost. */
  tokens: (number)[]
}

/** The totals for the whole range. */
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
  /** Two candidates of the same step. Empty if there aren't two to compare. */
  candidates: (CandidateAnswer)[]
  /** Number of votes in their step. */
  votes: number
  /** Number of votes after which each candidate was compared with five others, or with all. */
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

/** Limits of a run. null means no limit. */
export interface PipelineLimits {
  candidates: number | null
  tokens: number | null
  concurrent_jobs: number
  until: string | null
  /** Maximum size of its files in bytes. The run is paused when it is reached. */
  bytes: number | null
}

export interface PipelinePage {
  pipelines: (PipelineAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

/** A pipeline run with its status, steps and costs. */
export interface PipelineRunAnswer {
  id: string
  pipeline_id: string
  /** The pipeline's name. */
  pipeline: string
  status: PipelineRunStatus
  pause_reason: string | null
  /** Why nothing was submitted at the last check. null while the next check is due. */
  reason: string | null
  /** The problem that prevents the next job. */
  trouble: string | null
  /** Once the problem has lasted this many seconds, only a person can solve it. null if it may resolve itself. */
  trouble_seconds: number | null
  target_folder: string
  base_candidates: number
  variables: Record<string, unknown>
  limits: PipelineLimits
  /** Reserved and consumed tokens. */
  tokens: number
  created_at: string
  changed_at: string
  files_removed_at: string | null
  steps: (StepAnswer)[]
  /** Number of jobs by status. */
  jobs: Record<string, number>
  /** Jobs that are waiting for a worker. */
  queued: number
  /** Share of successful jobs among those that ended. null if none has ended. */
  success_rate: number | null
  /** Size of its files in bytes. */
  bytes: number
  /** Estimated from the duration of the last jobs. */
  seconds_left: number | null
  /** Use `events?after=…` with this id to receive subsequent events. */
  last_event_id: number
}

export type PipelineRunStatus = "active" | "paused" | "cancelled"

export interface PipelineRunSummaries {
  runs: (PipelineRunSummary)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

export interface PipelineRunSummary {
  id: string
  pipeline_id: string
  /** The pipeline's name. */
  pipeline: string
  status: PipelineRunStatus
  pause_reason: string | null
  /** Why nothing was submitted at the last check. null while the next check is due. */
  reason: string | null
  /** The problem that prevents the next job. */
  trouble: string | null
  /** Once the problem has lasted this many seconds, only a person can solve it. null if it may resolve itself. */
  trouble_seconds: number | null
  target_folder: string
  base_candidates: number
  variables: Record<string, unknown>
  limits: PipelineLimits
  /** Reserved and consumed tokens. */
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
  /** A stable code. */
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
  /** Weighted by the typical duration of each node. */
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

/** A property of a workflow. Unknown fields cause a warning in the response, because they may be misspelled. */
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
  /** Sorted by slug. */
  effects: (EffectAnswer)[]
  /** Tags of all published effects, sorted by name. Only on the first page. */
  tags: (string)[]
  /** Pass this as `after` to get the next page. null on the last page. */
  next: string | null
}

export interface PublicKeys {
  /** Newest first, including revoked ones. */
  keys: (KeyAnswer)[]
}

/** A question of a run, because a node's backend is offline or a node requires approval. */
export interface QuestionSeen {
  node: string
  index: (number)[]
  message: string
  /** Backends that could replace it, best first. */
  backends: (string)[]
  choices: (Choice)[]
  /** When it is answered automatically, according to the graph. */
  deadline: string | null
  /** Number of items to pick from. null if there is nothing to pick. */
  pick_from: number | null
  /** The node's price on any backend. null if it runs no job. */
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
  /** Nodes that run or are skipped, counted once per item and round. */
  executions_min: number
  executions_max: number
  /** A run with more executions is refused or fails. */
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

/** The state of a machine at a point in time. Values that can't be read are None. */
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
  /** Newest first. */
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
  /** Checks that were not possible, and parts that no worker can run. */
  warnings: (string)[]
  /** Information that will be known later. */
  notes: (string)[]
}

export interface Repaired {
  dispatches_ended: number
  dispatches_made: number
  pools_skipped: number
  rows_read: number
  /** Pass this as `after` to continue. null if everything was read. */
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

/** The run whose results were reused, and the differences from it. */
export interface RerunOf {
  run_id: string
  /** The node from which everything ran again. null if only nodes ran that had no result or were changed. */
  node: string | null
  /** The inputs with new values. */
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

/** The origin of a result that was reused instead of running the node again. */
export interface ReusedFrom {
  /** null if the result was a user's answer instead of a job's. */
  job_id: string | null
  /** The graph run that created the result, if any. */
  run_id: string | null
}

export interface Revoked {
  worker_id: string
  /** SLUG/STAGE */
  fleet: string
  /** online, faulty, offline, draining, pending or revoked */
  state: string
  /** Why a faulty worker can't run jobs. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Number of jobs that it currently holds. This can exceed `max_concurrency` by one: that job is waiting on the worker for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it last contacted the control plane, if it is overdue. It may be offline. */
  silent_since: string | null
  created_at: string
  /** Number of requeued jobs. */
  requeued: number
  /** Further steps that may be needed to keep it out. */
  hint: string
}

export type Role = "viewer" | "operator" | "owner"

export interface RotateKey {
  /** The key it has is dead at once. Else it is told the new one with its next answer, and has both until it uses that. */
  now?: boolean
}

/** The backend's response. `error` is a short reason if there is none. */
export interface RouteAnswer {
  worker_id: string
  call_id: string
  status?: number
  headers?: Record<string, string>
  body?: string
  error?: string | null
}

/** A call to send to the backend once. `target` is its path and query. */
export interface RouteCall {
  id: string
  method: "GET" | "HEAD" | "POST" | "PUT" | "DELETE"
  target: string
  headers: Record<string, string>
  body: string
  answer_seconds: number
}

/** Requests a call of a route below one of these prefixes. */
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

/** Two runs side by side. Files are compared by content if it is known. */
export interface RunComparison {
  a: ComparedRun
  b: ComparedRun
  values: (ComparedValue)[]
  /** Number of equal values. */
  same: number
  different: number
  /** Number of values that are not listed because there are too many. */
  left_out: number
}

/** Errors that only a person can resolve. */
export type RunErrorCode = "no_tokens" | "no_backend" | "withdrawn"

/** A small image of a run's intermediate result. Each preview replaces the previous one. */
export interface RunPreview {
  node_id?: string | null
  content_type?: "image/jpeg" | "image/png" | "image/webp" | "image/gif"
  base64: string
  metadata?: Record<string, string | null>
}

/** The dependencies in a run, and the executions that determine its duration. */
export interface RunTimeline {
  run_id: string
  name: string
  status: GraphRunStatus
  started_at: string
  /** Seconds until the end of the run, or until now. */
  seconds: number
  /** In the order of the graph. */
  nodes: (NodeTimeline)[]
  /** Each step waited for the previous one. Only the longest steps are listed if there are many. */
  critical_path: (CriticalStep)[]
  /** Total number of steps on the critical path. */
  critical_total: number
}

export interface RunningNodeSeen {
  node_id: string
  index: (number)[]
  /** The backend that runs it, if backends are shown. Otherwise, the backend that it is bound to. */
  backend_id: string | null
  /** 0 to 1. */
  progress: number
  current_step: string | null
}

/** The next times of a schedule. */
export interface ScheduleMoments {
  moments: (string)[]
}

export type Scope = "read" | "write" | "keys"

/** The best matches of each kind, newest first. */
export interface SearchAnswer {
  media: (FoundMedia)[]
  effects: (FoundEffect)[]
  jobs: (FoundJob)[]
}

/** The signed-in user: a customer (`tenant`, `user`, `scopes`), an operator (`operator`, `role`), or one person who is both. */
export interface SessionAnswer {
  signed_in: boolean
  /** `operator` for a person who is both. null if nobody is signed in. */
  kind: SessionKind | null
  kinds: (SessionKind)[]
  tenant: SessionTenant | null
  user: SessionUser | null
  scopes: (Scope)[]
  /** The operator's name in the audit log. */
  operator: string | null
  role: Role | null
  /** Send this as `X-CSRF-Token` with every change. */
  csrf: string | null
  /** When the session expires. */
  expires_at: string | null
  /** Whether `GET /api/catalogue` shows effects to everyone. */
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
  /** The environment variable for the setting. */
  variable: string
  /** Secrets and passwords are masked. */
  value: string | number | boolean
  /** A description of the setting. */
  remark: string
  is_default: boolean
}

export interface SettingsAnswer {
  version: string
  /** Whether ComfyUI's editor is installed under `/editor/`. */
  has_editor: boolean
  /** The current settings, read only. */
  settings: (SettingAnswer)[]
}

/** A link that shows a result to everyone who has the link. */
export interface ShareAnswer {
  id: string
  job_id: string
  video_id: string | null
  /** Whether it also shows the original, for a before/after comparison. */
  has_original: boolean
  created_at: string
  expires_at: string
  revoked_at: string | null
}

/** The contents of a link, without information about its owner. */
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
  /** Newest first, including revoked and expired ones. */
  shares: (ShareAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

export interface ShowBackends {
  /** Whether its users see machines; null: COMFYFLEET_SHOW_BACKENDS. */
  show_backends: boolean | null
}

/** A value that a node showed. `name` is the node's key for it, often `text`. */
export interface ShownValue {
  node_id: string
  name: string
  value?: unknown
}

/** The available sign-in methods. */
export interface SignInWays {
  /** `POST /api/session` with a key. */
  key: boolean
  /** `POST /api/session/local`, with the URL that `comfyfleet up` printed. */
  one_click: boolean
  /** `/auth/oidc/start`, with the operator's identity provider. */
  oidc: boolean
  /** The name of that provider. */
  oidc_name: string | null
}

/** The activity of an execution during a span, derived from its states. */
export type SpanKind = "running" | "asking" | "queued" | "held" | "retried"

export type StageName = "checked" | "waiting" | "making" | "finishing"

export type StageState = "done" | "current" | "to_come"

export interface StartsWithin {
  /** How long jobs may wait for machines that start on demand; null: COMFYFLEET_NO_BACKEND_SECONDS. */
  seconds: number | null
}

export interface StepAnswer {
  name: string
  /** Target number for the existing parents. */
  wanted: number
  made: number
  approved: number
  rejected: number
  in_flight: number
  failed: number
  needs_approval: boolean
  /** Candidates that a person must judge. 0 if no approval is required. */
  waiting: number
  judge: StepJudgeAnswer | null
  /** Jobs of the judge, out of the jobs in flight. */
  judging: number
  /** Candidates that the judge hasn't judged yet. */
  unjudged: number
}

/** The judge of a step, and its thresholds. */
export interface StepJudgeAnswer {
  /** Its measure, effect or workflow. */
  name: string
  /** Approves candidates with at least this score. null if it approves none. */
  approve_above: number | null
  /** Rejects candidates with a lower score. null if it rejects none. */
  reject_below: number | null
}

export interface StoppedWork {
  graph_runs: number
  pipeline_runs: number
  /** Number of paused triggers. */
  triggers: number
  /** Whether there is more. If so, repeat the call. */
  has_more: boolean
}

export interface Storage {
  /** Including announced uploads. */
  used_bytes: number
  max_storage_bytes: number
  /** Number of objects without a database row, if requested. A sweep deletes them after a day. */
  unnamed_objects: number | null
  /** false if only the first 100,000 objects were examined. */
  is_complete: boolean
}

/** An input that can be exposed. It has the form of a property for a new version. */
export interface SuggestedProperty {
  name: string
  type: "text" | "number" | "integer" | "boolean" | "choice" | "seed" | "image" | "video" | "audio"
  /** "<node id>.<input>" */
  binding: string
  node_id: string
  node_title: string
  /** Titles of the enclosing subgraphs, outermost first. */
  path: (string)[]
  input: string
  /** The saved value. */
  value: unknown
  /** null for media and seeds. */
  default: unknown
  minimum: number | null
  maximum: number | null
  step: number | null
  choices: unknown[] | null
  is_multiline: boolean
  /** file, text, seed, size, steps or model, if the input has such a role. */
  role: string | null
}

export interface SwitchAnswer {
  /** A checkpoint or diffusion model. */
  model: string
  /** Maximum cost of a switch to it, in seconds. */
  seconds: number
  /** Duration of its runs without a switch. */
  run_seconds: number
  /** Number of compared runs of each kind. */
  runs: number
  /** Whether a switch is so fast that jobs run in the order of arrival. */
  is_free: boolean
}

/** The media that an effect is applied to. */
export interface Takes {
  /** image, video or audio */
  kind: string
  /** Allowed media types. Empty if all types of the kind are allowed. */
  media_types: (string)[]
  max_bytes: number
}

export interface TenantAnswer {
  id: string
  name: string
  pool: string
  min_priority: number
  max_priority: number
  /** null means COMFYFLEET_MAX_QUEUED_PER_TENANT. */
  max_queued: number | null
  /** null means COMFYFLEET_RETENTION_DAYS. */
  retention_days: number | null
  /** null means COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT. */
  max_storage_bytes: number | null
  /** null means COMFYFLEET_SHOW_BACKENDS. */
  show_backends: boolean | null
  /** When the deletion of its private data started. */
  erasing_at: string | null
  /** When all data except the ledger had been deleted. */
  erased_at: string | null
  created_at: string
}

/** Limits for a tenant's prompts, on top of the limits of the fleets. */
export interface TenantPrompts {
  /** The fleets that it may use, as SLUG/STAGE. null means all fleets that accept prompts. */
  fleets: (string)[] | null
  /** Node types that its prompts may use on any of its fleets. */
  allow: (string)[]
  /** Node types that its prompts may not use. */
  deny: (string)[]
}

/** Open graph runs and pipeline runs, and all triggers. At most the newest 200 of each kind. */
export interface TenantWork {
  items: (WorkItemAnswer)[]
}

export interface Tenants {
  tenants: (TenantAnswer)[]
}

/** The terms of a workflow. Omitted fields aren't changed. */
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
  /** Seconds since the start of the run. */
  start: number
  end: number
}

/** An entry of the ledger. */
export interface TransactionAnswer {
  id: number
  type: TransactionType
  /** The change of the balance. */
  amount: number
  job_id: string | null
  /** The payment's id. */
  provider_transaction_id: string | null
  /** The effect that its job applied. */
  effect_id: string | null
  /** The media of its job. */
  video_id: string | null
  created_at: string
}

export type TransactionType = "PAYMENT_CREDIT" | "JOB_RESERVE" | "JOB_CONSUME" | "JOB_REFUND"

export interface Transactions {
  /** Newest first. */
  transactions: (TransactionAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: number | null
}

export interface TreeAnswer {
  tree: (Branch)[]
}

/** A schedule or incoming webhook that starts runs of a graph or pipeline. */
export interface TriggerAnswer {
  id: string
  name: string
  kind: TriggerKind
  graph_id: string | null
  /** null means the newest version. */
  version: number | null
  pipeline_id: string | null
  /** For runs of a pipeline. */
  base_candidates: number | null
  inputs: Record<string, unknown>
  cron: string | null
  timezone: string
  catch_up: boolean
  tokens_per_day: number
  /** Maximum tokens of one run. */
  max_tokens: number | null
  /** Tokens used today in its time zone. Open runs count with their maximum. */
  used_tokens: number
  is_paused: boolean
  /** Whether its daily tokens are used up. If so, it starts no runs until the next day. */
  is_spent: boolean
  /** For a schedule that is not paused. */
  next_at: string | null
  /** Number of scheduled times at which no control plane was running. */
  missed: number
  /** The newest missed time. */
  missed_at: string | null
  /** The path for incoming webhooks. */
  path: string | null
  created_at: string
}

export type TriggerKind = "schedule" | "webhook"

export interface Triggers {
  /** Newest first. */
  triggers: (TriggerAnswer)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

/** A numbered heartbeat whose response was lost, so that the worker doesn't know whether it arrived. */
export interface UnheardReport {
  number: number
  events?: (unknown[])[]
}

export interface Upload {
  /** Link it with POST /api/videos after the upload. */
  file_id: string
  file: UploadedFile | null
  /** For uploading the whole file at once. */
  upload: UploadSlot
  /** Used instead of `upload` if in_parts was sent. The parts can be uploaded separately, in any order and concurrently. */
  parts: (UploadPart)[]
  /** When the URLs expire. */
  expires_at: string
}

export interface UploadPart {
  /** Counted from 1. */
  number: number
  /** The position of its first byte in the file. */
  start: number
  /** In bytes. The body of its PUT must have exactly this size. */
  size: number
  /** null if the part has already been uploaded. */
  upload: UploadSlot | null
}

export interface UploadSlot {
  method: string
  url: string
  /** Send these headers unchanged. */
  headers: Record<string, string>
}

/** The state of an announced upload. */
export interface UploadState {
  file_id: string
  /** The announced size in bytes. */
  size: number
  received_bytes: number
  /** Whether the file is complete. If so, link it with POST /api/videos. */
  is_whole: boolean
  /** The parts of a file that is uploaded in parts, as long as some are missing. */
  parts: (UploadPart)[]
  /** When the URLs expire. Repeat the call for new ones. */
  expires_at: string
}

/** A file with its announced properties. */
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
  /** Oldest first. */
  users: (UserAnswer)[]
  /** Pass this as `after` to get the next page. null on the last page. */
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
  /** The node's name for the value. */
  name: string
  /** A text, number, boolean or JSON value. */
  value: unknown
}

/** Whether a graph is valid, and all its problems. */
export interface Verdict {
  valid: boolean
  /** All problems with their nodes and ports. */
  problems: (ProblemSeen)[]
  /** Nodes that no worker can run now. */
  warnings: (ProblemSeen)[]
  /** The parsed document, if a text was sent. */
  document: Record<string, unknown> | null
  /** The cost of a run, for a graph without problems. */
  quote: QuoteAnswer | null
}

/** An uploaded image, video or audio file, with the state of its latest job. */
export interface Video {
  id: string
  kind: "image" | "video" | "audio"
  /** The status of its latest job. */
  status: MediaStatus
  /** In percent. null if unknown. */
  progress: number | null
  /** Why its latest job failed. */
  error: string | null
  /** Its latest job. */
  job_id: string | null
  /** The effect of its latest job. */
  effect_id: string | null
  /** The name of the uploaded file. null once it has expired. */
  filename: string | null
  /** Valid for 15 minutes. In a list only with urls=true. */
  original_file_url: string | null
  /** The latest job's result, if any. Valid for 15 minutes; repeat the call for a new one. In a list only with urls=true. */
  processed_file_url: string | null
  /** A thumbnail of at most 512 pixels, with the same validity as the other URL. null if the file is not an image, or already small. */
  original_small_url: string | null
  /** A thumbnail of at most 512 pixels, with the same validity as the other URL. null if the file is not an image, or already small. */
  processed_small_url: string | null
  processed_content_type: string | null
  created_at: string
  expired_at: string | null
  /** Estimated from the effect's history, without the time in the queue. null if unknown, or if the run takes longer than usual. */
  estimated_seconds_left: number | null
  /** All its jobs, including unfinished ones; newest first, at most 100. */
  results: (MediaResult)[]
  /** Values that nodes showed: texts, numbers, booleans and JSON. */
  values: (Value)[]
  /** The texts of the first node that showed any. null if no node did. */
  text: string | null
}

export interface VideoSummary {
  id: string
  kind: "image" | "video" | "audio"
  /** The status of its latest job. */
  status: MediaStatus
  /** In percent. null if unknown. */
  progress: number | null
  /** Why its latest job failed. */
  error: string | null
  /** Its latest job. */
  job_id: string | null
  /** The effect of its latest job. */
  effect_id: string | null
  /** The name of the uploaded file. null once it has expired. */
  filename: string | null
  /** Valid for 15 minutes. In a list only with urls=true. */
  original_file_url: string | null
  /** The latest job's result, if any. Valid for 15 minutes; repeat the call for a new one. In a list only with urls=true. */
  processed_file_url: string | null
  /** A thumbnail of at most 512 pixels, with the same validity as the other URL. null if the file is not an image, or already small. */
  original_small_url: string | null
  /** A thumbnail of at most 512 pixels, with the same validity as the other URL. null if the file is not an image, or already small. */
  processed_small_url: string | null
  processed_content_type: string | null
  created_at: string
  expired_at: string | null
}

export interface Videos {
  /** Newest first. */
  videos: (VideoSummary)[]
  /** Pass this as `before` to get the next page. null on the last page. */
  next: string | null
}

/** A vote and the resulting scores. */
export interface VoteAnswer {
  /** Use this id to undo the vote. */
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

/** The balance, the tokens reserved for jobs, and recent changes. */
export interface WalletSummaryAnswer {
  /** Tokens that are not reserved. */
  balance: number
  /** Reserved for jobs that have not ended. */
  reserved_tokens: number
  /** The number of days that the totals below cover. */
  days: number
  added_tokens: number
  /** Spent on jobs that completed. */
  spent_tokens: number
  /** Refunded for jobs that did not complete. */
  refunded_tokens: number
  /** Where to buy tokens, if the operator has configured it. */
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

/** The complete settings. Omitted fields get their default. */
export interface WantedPrompts {
  /** Whether it accepts such prompts. */
  is_open?: boolean
  /** The price of each prompt in tokens. */
  price_tokens?: number
  /** Tokens per second on the GPU, instead of a fixed price. */
  price_per_second?: number | null
  /** Node types that may run although they are denied by default. */
  allow?: (string)[]
  /** Node types that may not run. Overrides every `allow`. */
  deny?: (string)[]
  /** Whether node types that are not ComfyUI's own may run. Node types with a path, a URL, code or a command as input are not included. */
  allows_unknown?: boolean
  /** Maximum number of nodes in a prompt. */
  nodes_max?: number
  /** Maximum size of a prompt as JSON, in bytes. */
  prompt_bytes_max?: number
  /** A run that takes longer is stopped and fails. */
  run_limit_seconds?: number
  /** Prefixes of routes that are forwarded to a worker's backend, such as /api/etn. */
  passthrough?: (string)[]
  /** Whether a client's WebSocket shows its prompts one after another, in the order in which they started, as with a single ComfyUI. If false, the messages of all prompts are shown as they arrive. */
  in_order?: boolean
}

/** The complete settings. Omitted fields get their default. */
export interface WantedTenantPrompts {
  /** The fleets that it may use, as SLUG/STAGE. null means all fleets that accept prompts. */
  fleets?: (string)[] | null
  /** Node types that its prompts may use on any of its fleets. */
  allow?: (string)[]
  /** Node types that its prompts may not use. */
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
  /** false if it was disabled after days of failed deliveries. Use …/activate to enable it. */
  is_active: boolean
  created_at: string
}

export type WebhookEvent = "job.completed" | "job.failed" | "job.cancelled" | "pipeline.alert" | "pipeline.paused" | "graph_run.ended" | "graph_run.failed" | "graph_run.asks"

/** A receiver's response to a test message. */
export interface WebhookTest {
  /** Whether the response had a status from 200 to 299. */
  is_delivered: boolean
  /** The status of the response. null if there was none. */
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

/** A tenant's run or trigger in the operators' view. */
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
  /** Why a faulty worker can't run jobs. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Number of jobs that it currently holds. This can exceed `max_concurrency` by one: that job is waiting on the worker for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it last contacted the control plane, if it is overdue. It may be offline. */
  silent_since: string | null
  created_at: string
}

export interface WorkerDetail {
  worker_id: string
  /** SLUG/STAGE */
  fleet: string
  /** online, faulty, offline, draining, pending or revoked */
  state: string
  /** Why a faulty worker can't run jobs. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Number of jobs that it currently holds. This can exceed `max_concurrency` by one: that job is waiting on the worker for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it last contacted the control plane, if it is overdue. It may be offline. */
  silent_since: string | null
  created_at: string
  /** The workflows that it may run according to its fleet's assignments. */
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
  /** null while it is being prepared. */
  started_at: string | null
  percent: number | null
  /** The node that is running. */
  node: string | null
}

export interface WorkerSeen {
  worker_id: string
  /** SLUG/STAGE */
  fleet: string
  /** online, faulty, offline, draining, pending or revoked */
  state: string
  /** Why a faulty worker can't run jobs. */
  problem: string | null
  is_approved: boolean
  is_draining: boolean
  /** Number of jobs that it currently holds. This can exceed `max_concurrency` by one: that job is waiting on the worker for its turn. */
  current_load: number
  max_concurrency: number
  capabilities: (string)[]
  providers: (string)[]
  models_loaded: (string)[]
  registration_source: string
  protocol_version: number
  last_seen_at: string
  /** When it last contacted the control plane, if it is overdue. It may be offline. */
  silent_since: string | null
  created_at: string
  /** For example, ComfyUI. null if not reported yet. */
  backend_kind: string | null
  backend_version: string | null
  gpu: string | null
  gpu_memory_bytes: number | null
  /** The last metrics of its machine. */
  reading: Reading | null
  /** When the metrics were reported. */
  read_at: string | null
  /** The jobs that it currently holds. */
  jobs: (WorkerJob)[]
}

export interface Workers {
  workers: (WorkerSeen)[]
  /** Pass this as `after` to get the next page. null on the last page. */
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
  /** The price of a job in customers' graphs and pipelines. null if it isn't offered there. */
  price_tokens: number | null
  /** The fleets that it is assigned to, as SLUG/STAGE. */
  fleets: (string)[]
  created_at: string
  /** Whether a job may complete without a file and a value. */
  output: "required" | "optional"
  /** How delivered files are marked as created by AI. */
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
  /** The price of a job in customers' graphs and pipelines. null if it isn't offered there. */
  price_tokens: number | null
  /** The fleets that it is assigned to, as SLUG/STAGE. */
  fleets: (string)[]
  created_at: string
  /** Whether a job may complete without a file and a value. */
  output: "required" | "optional"
  /** How delivered files are marked as created by AI. */
  ai_mark: "auto" | "generated" | "edited" | "none"
  /** The type of its document: workflow or prompt. */
  kind: string
  document_hash: string
  output_node_id: string | null
  properties: (PropertyAnswer)[]
  node_types: (string)[]
  models: (Model)[]
  versions: (number)[]
  /** The time of registration by version. */
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
  /** 95 of 100 jobs waited less than this. */
  wait_p95_seconds: number | null
  run_p95_seconds: number | null
  /** Number of completed and failed jobs in each step. It has the same length as `series.at`. */
  ended: (number)[]
  /** Currently queued jobs. */
  queued: number
  /** Currently running jobs. */
  running: number
  /** Jobs that workers currently have, but that have not started. */
  held: number
}

export interface WorkflowInspection {
  /** json, png, webp, mp4 … */
  file_kind: string
  form: "workflow" | "prompt"
  /** The document for registering it. */
  document: Record<string, unknown>
  drawing: Drawing
  /** Most important first. */
  properties: (SuggestedProperty)[]
  outputs: (WorkflowOutput)[]
  node_types: (string)[]
  /** Models and other files that it refers to. */
  files: (string)[]
  /** The requirements that the best fleet doesn't meet. null if no fleet has reported its contents. */
  missing: MissingInFile | null
  notes: (string)[]
}

export interface WorkflowOffer {
  /** The field for its name in a graph's node. */
  kind: "effect" | "workflow"
  name: string
  /** The version that a node gets if it doesn't specify one. */
  version: number
  price_tokens: number
  /** null if not measured yet. */
  typical_seconds: number | null
  properties: (OfferedProperty)[]
}

export interface WorkflowOffers {
  /** Effects first, sorted by name. */
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
