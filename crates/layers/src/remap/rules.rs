//! Compiles settings to rules: resolves names, parses grammars, refuses contradictions, once,
//! before anything is served.
//!
//! Called when a stack is built and again at each reload. The result is immutable and shared.

use super::{
    hide::Hidden,
    id_map::{self, IdMap, MapRule},
    members::{MemberList, Members},
    owner::{Ids, Owners},
    passwd,
    perms::Perms,
    policy::Policies,
};
use crate::{
    accounts::{Accounts, Everybody, Processes, group_id, user_id},
    context::{Context, Devices, Mounter},
    settings::{CreateAs, RemapSpec},
};
use nacre_vfs::Kind;
use std::{fmt, sync::Arc};

/// Rules for one type of file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KindRules {
    pub(super) force_user: Option<u32>,
    pub(super) force_group: Option<u32>,
    pub(super) perms: Perms,
    pub(super) create_for_user: Option<u32>,
    pub(super) create_for_group: Option<u32>,
    pub(super) create_with_perms: Perms,
    pub(super) chmod_filter: Perms,
}

/// One value for each type of file.
#[derive(Clone, Debug, Default)]
pub(super) struct PerKind<T> {
    file: T,
    directory: T,
    symlink: T,
    block: T,
    character: T,
    fifo: T,
    socket: T,
}

impl<T> PerKind<T> {
    pub(super) fn get(&self, kind: Kind) -> &T {
        match kind {
            Kind::File => &self.file,
            Kind::Directory => &self.directory,
            Kind::Symlink => &self.symlink,
            Kind::Block => &self.block,
            Kind::Character => &self.character,
            Kind::Fifo => &self.fifo,
            Kind::Socket => &self.socket,
        }
    }

    fn any(&self, test: impl Fn(&T) -> bool) -> bool {
        let PerKind { file, directory, symlink, block, character, fifo, socket } = self;
        [file, directory, symlink, block, character, fifo, socket].into_iter().any(test)
    }

    /// The value for a letter of find's `-type`.
    fn by_letter(&mut self, letter: char) -> Option<&mut T> {
        Some(match letter {
            'f' => &mut self.file,
            'd' => &mut self.directory,
            'l' => &mut self.symlink,
            'b' => &mut self.block,
            'c' => &mut self.character,
            'p' => &mut self.fifo,
            's' => &mut self.socket,
            _ => return None,
        })
    }
}

/// Callers that are shown as the owner of every file.
#[derive(Debug)]
pub(super) struct Mirror {
    pub(super) members: Members,
    /// All other users but root see no permissions.
    pub(super) only: bool,
}

/// All rules of one remap, ready for use.
pub struct Rules {
    pub(super) owners: Owners,
    pub(super) kinds: PerKind<KindRules>,
    pub(super) mirror: Option<Mirror>,
    /// The mounter whose access limits the permissions that are shown.
    pub(super) realistic: Option<Mounter>,
    /// Whether new files belong to their callers; else they belong to `mounter`. A rule for a type
    /// overrides both.
    pub(super) callers_own: bool,
    /// Ids of the mounter.
    pub(super) mounter: (u32, u32),
    pub(super) policies: Policies,
    /// Whether any rule but an offset shows another owner or group: set-id bits are checked then.
    pub(super) rewrites_owners: bool,
    /// Whether any rule but an offset shows another group.
    pub(super) rewrites_groups: bool,
    pub(super) processes: Arc<dyn Processes>,
    pub(super) hidden: Hidden,
    pub(super) hide_hard_links: bool,
    pub(super) block_devices: Option<Arc<dyn Devices>>,
    pub(super) ctime_from_mtime: bool,
    /// Whether any rule rewrites shown permission bits.
    pub(super) rewrites_modes: bool,
    /// Whether any rule rewrites a mode that is set.
    pub(super) filters_modes: bool,
    pub(super) settings: Vec<(String, String)>,
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Error of unusable settings: a sentence for the user, which names the setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesError {
    what: String,
    /// The setting is for root alone.
    pub denied: bool,
}

impl fmt::Display for RulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for RulesError {}

impl RulesError {
    fn new(what: String) -> RulesError {
        RulesError { what, denied: false }
    }
}

type Outcome<T> = Result<T, RulesError>;

/// Prefixes an error with the name of its setting.
fn at<T>(key: &str, result: Result<T, impl fmt::Display>) -> Outcome<T> {
    result.map_err(|why| RulesError::new(format!("{key}: {why}")))
}

impl Rules {
    /// Checks the syntax of settings, independent of the machine: every user and group is taken to
    /// exist.
    ///
    /// # Errors
    /// A malformed setting, or one that contradicts another.
    pub fn check(spec: &RemapSpec) -> Outcome<()> {
        refuse_contradictions(spec)?;
        let everybody = Everybody::default();
        kinds(spec, &everybody)?;
        member_list(spec, &everybody)?;
        at("hide", Hidden::new(&spec.hide))?;
        let map = spec.map.as_deref().unwrap_or_default();
        let (users, groups) = map_rules(map, &everybody)?;
        // Names are resolved later: only numbers can be checked for conflicts now.
        if map.bytes().all(|byte| byte.is_ascii_digit() || b"/-+*@,:".contains(&byte)) {
            id_maps(&users, &groups)?;
        }
        Ok(())
    }

    /// Compiles settings. Harmless omissions (unknown names in a passwd file) are added to
    /// `warnings`.
    ///
    /// # Errors
    /// A setting that is malformed, contradicts another, or needs root.
    pub fn new(spec: &RemapSpec, context: &Context, warnings: &mut Vec<String>) -> Outcome<Rules> {
        refuse_contradictions(spec)?;
        if !context.mounter.is_root() {
            refuse_without_root(spec, &context.mounter)?;
        }
        let kinds = kinds(spec, &*context.accounts)?;
        let realistic = spec.realistic_permissions.then(|| context.mounter.clone());
        let owners = owners(spec, context, warnings)?;
        let mirror = mirror(spec, context)?;
        let rewrites_groups = owners.groups.has_map() || kinds.any(|rules| rules.force_group.is_some());
        let rewrites_users = owners.users.has_map() || kinds.any(|rules| rules.force_user.is_some());
        Ok(Rules {
            rewrites_owners: mirror.is_some() || rewrites_users || rewrites_groups,
            rewrites_groups,
            processes: Arc::clone(&context.processes),
            owners,
            mirror,
            rewrites_modes: realistic.is_some() || kinds.any(|rules| !rules.perms.is_empty()),
            filters_modes: kinds.any(|rules| !rules.chmod_filter.is_empty()),
            kinds,
            realistic,
            callers_own: callers_own(spec, &context.mounter),
            mounter: (context.mounter.uid, context.mounter.gid),
            policies: policies(spec),
            hidden: at("hide", Hidden::new(&spec.hide))?,
            hide_hard_links: spec.hide_hard_links,
            block_devices: spec.block_devices_as_files.then(|| Arc::clone(&context.devices)),
            ctime_from_mtime: spec.ctime_from_mtime,
            settings: spec
                .settings()
                .into_iter()
                .map(|(key, value)| (key.to_owned(), String::from_utf8_lossy(&value).into_owned()))
                .collect(),
        })
    }
}

fn refuse_contradictions(spec: &RemapSpec) -> Outcome<()> {
    let clash =
        |a: &str, b: &str, why: &str| Err(RulesError::new(format!("{a} and {b} cannot be used together: {why}")));
    if spec.mirror.is_some() && spec.mirror_only.is_some() {
        return clash("mirror", "mirror-only", "name all users in one of the two");
    }
    if spec.map.is_some() && spec.uid_offset.is_some() {
        return clash("map", "uid-offset", "write the offset as a map of ranges, as in 1000-1999/5000-5999");
    }
    if spec.map.is_some() && spec.gid_offset.is_some() {
        return clash("map", "gid-offset", "write the offset as a map of ranges, as in @1000-1999/@5000-5999");
    }
    if spec.map_passwd.is_some() && spec.map_passwd_rev.is_some() {
        return clash("map-passwd", "map-passwd-rev", "they are the same table in opposite directions");
    }
    if spec.map_group.is_some() && spec.map_group_rev.is_some() {
        return clash("map-group", "map-group-rev", "they are the same table in opposite directions");
    }
    Ok(())
}

fn refuse_without_root(spec: &RemapSpec, mounter: &Mounter) -> Outcome<()> {
    let for_types = |key: &str| {
        spec.for_types.iter().any(|rule| rule.split_once(':').is_some_and(|(_, rest)| rest.starts_with(key)))
    };
    let asked = [
        ("map", spec.map.is_some()),
        ("map-passwd", spec.map_passwd.is_some()),
        ("map-group", spec.map_group.is_some()),
        ("map-passwd-rev", spec.map_passwd_rev.is_some()),
        ("map-group-rev", spec.map_group_rev.is_some()),
        ("uid-offset", spec.uid_offset.is_some()),
        ("gid-offset", spec.gid_offset.is_some()),
        ("create-as-user", spec.create_as == CreateAs::User),
        ("create-for-user", spec.create_for_user.is_some() || for_types("create-for-user=")),
        ("create-for-group", spec.create_for_group.is_some() || for_types("create-for-group=")),
    ];
    match asked.into_iter().find(|(_, asked)| *asked) {
        Some((key, _)) => Err(RulesError {
            what: format!(
                "{key} can only be used by root, since it has to change owners in the source; run it as root (this is user {})",
                mounter.uid
            ),
            denied: true,
        }),
        None => Ok(()),
    }
}

fn kinds(spec: &RemapSpec, accounts: &dyn Accounts) -> Outcome<PerKind<KindRules>> {
    let mut general = KindRules::default();
    for (key, value) in [
        ("force-user", &spec.force_user),
        ("force-group", &spec.force_group),
        ("perms", &spec.perms),
        ("create-for-user", &spec.create_for_user),
        ("create-for-group", &spec.create_for_group),
        ("create-with-perms", &spec.create_with_perms),
        ("chmod-filter", &spec.chmod_filter),
    ] {
        if let Some(value) = value {
            apply(&mut general, key, value, accounts)?;
        }
    }
    let mut kinds = PerKind {
        file: general.clone(),
        directory: general.clone(),
        symlink: general.clone(),
        block: general.clone(),
        character: general.clone(),
        fifo: general.clone(),
        socket: general,
    };
    for rule in &spec.for_types {
        apply_for(&mut kinds, rule, accounts)?;
    }
    Ok(kinds)
}

/// Keys that `for` accepts.
const FOR_KEYS: &str =
    "force-user, force-group, perms, create-for-user, create-for-group, create-with-perms, chmod-filter";

fn apply(rules: &mut KindRules, key: &str, value: &str, accounts: &dyn Accounts) -> Outcome<()> {
    match key {
        "force-user" => rules.force_user = Some(at(key, user_id(accounts, value))?),
        "force-group" => rules.force_group = Some(at(key, group_id(accounts, value))?),
        "perms" => rules.perms = at(key, value.parse::<Perms>())?,
        "create-for-user" => rules.create_for_user = Some(at(key, user_id(accounts, value))?),
        "create-for-group" => rules.create_for_group = Some(at(key, group_id(accounts, value))?),
        "create-with-perms" => rules.create_with_perms = at(key, value.parse::<Perms>())?,
        "chmod-filter" => rules.chmod_filter = at(key, value.parse::<Perms>())?,
        _ => {
            return Err(RulesError::new(format!(
                "\"{}\" cannot depend on the type of a file; allowed are {FOR_KEYS}",
                key.escape_debug()
            )));
        }
    }
    Ok(())
}

fn apply_for(kinds: &mut PerKind<KindRules>, rule: &str, accounts: &dyn Accounts) -> Outcome<()> {
    let bad = |why: &str| RulesError::new(format!("for: invalid rule \"{}\": {why}", rule.escape_debug()));
    let form = "write TYPES:KEY=VALUE, as in d:perms=0755";
    let (letters, setting) = rule.split_once(':').ok_or_else(|| bad(form))?;
    let (key, value) = setting.split_once('=').ok_or_else(|| bad(form))?;
    if letters.is_empty() {
        return Err(bad(form));
    }
    for letter in letters.chars() {
        if letter == 'l' && matches!(key, "perms" | "create-with-perms" | "chmod-filter") {
            return Err(bad("symbolic links have no permissions of their own; leave the l out"));
        }
        let rules = kinds.by_letter(letter).ok_or_else(|| bad("the types are f d l b c p s, as for find -type"))?;
        apply(rules, key, value, accounts)
            .map_err(|error| RulesError::new(format!("for: invalid rule \"{}\": {error}", rule.escape_debug())))?;
    }
    Ok(())
}

/// Parses `map` into rules for users, and for groups.
fn map_rules(text: &str, accounts: &dyn Accounts) -> Outcome<(Vec<MapRule>, Vec<MapRule>)> {
    let (mut users, mut groups) = (Vec::new(), Vec::new());
    for item in map_items(text)? {
        at(
            "map",
            match item {
                MapItem::User(text) => id_map::parse_rule(text, &|name| user_id(accounts, name), &mut users),
                MapItem::Group(left, right) => id_map::parse_rule(
                    &format!("{left}/{right}"),
                    &|name| group_id(accounts, name.trim_start_matches('@')),
                    &mut groups,
                ),
            },
        )?;
    }
    Ok((users, groups))
}

/// Compiles both maps, users first.
fn id_maps(users: &[MapRule], groups: &[MapRule]) -> Outcome<(IdMap, IdMap)> {
    let map = |kind: &str, rules: &[MapRule]| {
        IdMap::new(rules).map_err(|error| RulesError::new(format!("map: {kind} {error}")))
    };
    Ok((map("user", users)?, map("group", groups)?))
}

fn owners(spec: &RemapSpec, context: &Context, warnings: &mut Vec<String>) -> Outcome<Owners> {
    let accounts = &*context.accounts;
    let (mut users, mut groups) = map_rules(spec.map.as_deref().unwrap_or_default(), accounts)?;
    for (key, path, reversed) in
        [("map-passwd", &spec.map_passwd, false), ("map-passwd-rev", &spec.map_passwd_rev, true)]
    {
        if let Some(path) = path {
            let text = at(key, read(path))?;
            users.extend(at(
                key,
                passwd::rules(&text, reversed, &|name| Ok(accounts.user(name)?.map(|user| user.uid)), warnings),
            )?);
        }
    }
    for (key, path, reversed) in [("map-group", &spec.map_group, false), ("map-group-rev", &spec.map_group_rev, true)] {
        if let Some(path) = path {
            let text = at(key, read(path))?;
            groups.extend(at(key, passwd::rules(&text, reversed, &|name| accounts.group(name), warnings))?);
        }
    }
    let (users, groups) = id_maps(&users, &groups)?;
    let ids = |map: IdMap, offset: Option<i64>| Ids { map, offset: offset.unwrap_or(0) };
    Ok(Owners { users: ids(users, spec.uid_offset), groups: ids(groups, spec.gid_offset) })
}

enum MapItem<'a> {
    User(&'a str),
    Group(&'a str, &'a str),
}

/// Splits a map into items, with and without `@`. A separator at the end is allowed.
fn map_items(text: &str) -> Outcome<Vec<MapItem<'_>>> {
    let text = text.strip_suffix([',', ':']).filter(|rest| !rest.is_empty()).unwrap_or(text);
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let item = |item| match str::strip_prefix(item, '@') {
        None => Ok(MapItem::User(item)),
        Some(group) => match group.split_once("/@") {
            Some((left, right)) => Ok(MapItem::Group(left, right)),
            None => Err(RulesError::new(format!(
                "map: invalid map \"{}\": write @FROM/@TO for groups",
                str::escape_debug(item)
            ))),
        },
    };
    text.split([',', ':']).map(item).collect()
}

fn read(path: &std::path::Path) -> Result<String, String> {
    let bytes =
        std::fs::read(path).map_err(|error| format!("cannot read {}: {error}; check the path", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The list of `mirror` or `mirror-only`, and whether all other users are excluded.
fn member_list(spec: &RemapSpec, accounts: &dyn Accounts) -> Outcome<Option<(MemberList, bool)>> {
    let (key, list, only) = match (&spec.mirror, &spec.mirror_only) {
        (Some(list), _) => ("mirror", list, false),
        (None, Some(list)) => ("mirror-only", list, true),
        (None, None) => return Ok(None),
    };
    Ok(Some((at(key, MemberList::parse(list, accounts))?, only)))
}

fn mirror(spec: &RemapSpec, context: &Context) -> Outcome<Option<Mirror>> {
    let list = member_list(spec, &*context.accounts)?;
    Ok(list.map(|(list, only)| Mirror { members: Members::new(list, context), only }))
}

fn callers_own(spec: &RemapSpec, mounter: &Mounter) -> bool {
    match spec.create_as {
        CreateAs::User => true,
        CreateAs::Auto => mounter.is_root(),
        CreateAs::Mounter => false,
    }
}

fn policies(spec: &RemapSpec) -> Policies {
    Policies {
        chown: spec.chown,
        chgrp: spec.chgrp,
        chmod: spec.chmod,
        chmod_allow_x: spec.chmod_allow_x,
        xattr: spec.xattr,
        delete_deny: spec.delete_deny,
        rename_deny: spec.rename_deny,
        replace_deny: spec.replace_deny,
        truncate_deny: spec.truncate_deny,
    }
}
